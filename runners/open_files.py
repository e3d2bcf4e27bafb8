"""Files that a guest may still write: how large they are, and the end of those that belong to no save any more.

A guest writes by descriptor, past everything that the broker could ask, and a file without a name lives on while a
descriptor of it does. So sizes are looked at while a save is open, and what was dropped is emptied again and again
until nobody can write it.
"""

import os
from pathlib import Path

from runners.store import lease

_BLOCK = 512
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


class OpenFiles:
    """The files of one attempt. Only the broker's loop calls this. It holds a descriptor for reading of each."""

    def __init__(self) -> None:
        self._present: list[int] = []
        self._left: list[int] = []

    def add(self, path: Path) -> None:
        """Look at a file of the open save from now on; raises OSError."""
        self._present.append(os.open(path, _READ))

    def size(self) -> int:
        """Return the bytes of the open save: what its files claim or occupy, whichever is more."""
        return sum(max(i.st_size, i.st_blocks * _BLOCK) for i in map(os.fstat, self._present))

    def leave(self) -> None:
        """The save is over, committed or dropped: keep in mind what of it can still be written."""
        self._left += self._present
        self._present = []
        self.empty()

    def empty(self) -> int:
        """Empty what was dropped and can still be written, let go of the rest; return how many stay."""
        self._left = [fd for fd in self._left if not _let_go(fd)]
        return len(self._left)

    def close(self) -> None:
        """Let go of all: the attempt is over, its processes are dead."""
        self.leave()
        for fd in self._left:
            os.close(fd)
        self._left = []


def _let_go(fd: int) -> bool:
    """Close the descriptor of a file that has no writer; else take what a file without a name holds, and say False.

    A file in the store has a name and no writer, so that nothing committed is ever emptied.
    """
    if lease(fd):
        os.close(fd)
        return True
    found = os.fstat(fd)
    if found.st_nlink == 0 and (found.st_size or found.st_blocks):
        os.truncate(f"/proc/self/fd/{fd}", 0)
    return False
