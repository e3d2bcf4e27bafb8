"""Files of an open save that are proven while the guest still writes the next one.

A file that nobody can write any more never changes again, so a proof of it holds at the commit, whenever it was
made. Only proofs are kept: whatever stands in the way, a writer most of all, is left for the commit to find out.
"""

import threading
from collections.abc import Callable, Iterable

from interlock.errors import Conflict, Refusal
from interlock.manifest import FileRow

Proof = tuple[FileRow, list[str]]


class Early:
    """The early proofs of one save, one at a time. `begin` is called by the broker's loop, `take` by a commit."""

    def __init__(self) -> None:
        self._proofs: dict[str, Proof] = {}
        self._tried: set[str] = set()
        self._thread: threading.Thread | None = None

    def begin(self, names: Iterable[str], prove: Callable[[str], Proof]) -> None:
        """Start to prove those of `names` that were not tried yet, unless a proof is still being made.

        Args: `prove` returns the proof of a file that has no writer, and does not wait for one that has.
        """
        if self._thread is not None and self._thread.is_alive():
            return
        wanted = [n for n in names if n not in self._tried]
        if not wanted:
            return
        self._tried |= set(wanted)
        self._thread = threading.Thread(target=self._work, args=(wanted, prove), name="early-proof", daemon=True)
        self._thread.start()

    def _work(self, names: list[str], prove: Callable[[str], Proof]) -> None:
        for name in names:
            try:
                self._proofs[name] = prove(name)
            except Conflict:
                self._tried.discard(name)  # another rank is still writing it: tried again with the next file
            except (Refusal, OSError):
                continue

    def take(self, name: str) -> Proof | None:
        """Return the proof of a file, after waiting for one that is being made; None when there is none."""
        if name in self._tried and self._thread is not None:
            self._thread.join()
        return self._proofs.pop(name, None)
