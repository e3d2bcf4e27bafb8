"""Files that go to the disk while others are still written, so that a commit waits for the last ones only."""

import os
from concurrent.futures import Future, ThreadPoolExecutor

THREADS = 4


class Syncing:
    """The files of one save that are being fsynced, or are. Args: `threads` do it, for all saves."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._begun: dict[str, Future[None]] = {}

    def begin(self, name: str, fd: int) -> None:
        """fsync the file `name` beside the caller, who may close `fd` at once; nobody can write the file any more."""
        if name not in self._begun:
            self._begun[name] = self._threads.submit(_sync, os.dup(fd))

    def wait(self) -> set[str]:
        """Return the names of the files that are on the disk, once all that were begun are; raises OSError."""
        for done in self._begun.values():
            done.result()
        return set(self._begun)


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
