"""Files of an open save that are proven while the guest still writes others.

A file that nobody can write any more never changes again, so a proof of it holds at the commit, whenever it was
made. Only proofs are kept: whatever stands in the way, a writer most of all, is left for the commit to find out.
"""

import os
import threading
from collections.abc import Callable

from interlock.errors import Conflict, Refusal
from interlock.manifest import FileRow

Proof = tuple[FileRow, list[str]]
THREADS = max(1, min(4, (os.cpu_count() or 1) // 2))
SOON_S, LATE_S = 0.002, 0.05  # how long after a round that found no finished file the next one begins


class Early:
    """The early proofs of one save. `add` and `end` are called by the broker's loop, `take` by a commit.

    `_news` guards what is below it. A file is waiting, at work, or neither: proven, taken or left for the commit.
    """

    def __init__(self) -> None:
        self._news = threading.Condition()
        self._waiting: dict[str, Callable[[], Proof]] = {}
        self._at_work: set[str] = set()
        self._proofs: dict[str, Proof] = {}
        self._threads = 0
        self._ended = False

    def add(self, name: str, prove: Callable[[], Proof]) -> None:
        """Prove a file as soon as it is finished.

        Args: `prove` returns the proof of a file that has no writer, and raises Conflict at once for one that has.
        """
        with self._news:
            self._waiting[name] = prove
            self._news.notify_all()
            if self._threads < THREADS:
                self._threads += 1
                threading.Thread(target=self._work, name="early-proof", daemon=True).start()

    def take(self, name: str) -> Proof | None:
        """Return the proof of a file, after waiting for one that is being made; None when there is none, and then
        none is begun any more."""
        with self._news:
            self._news.notify_all()  # what is still waiting is finished by now
            while name in self._at_work:
                self._news.wait()
            self._waiting.pop(name, None)
            return self._proofs.pop(name, None)

    def end(self) -> None:
        """Begin no further proof."""
        with self._news:
            self._ended = True
            self._waiting.clear()
            self._news.notify_all()

    def _work(self) -> None:
        pause = SOON_S
        while True:
            with self._news:
                names = list(self._waiting)
            found = [name for name in names if self._tried(name)]
            pause = SOON_S if found else min(2 * pause, LATE_S)
            with self._news:
                if not self._ended and not found and self._news.wait(pause):
                    pause = SOON_S
                if self._ended:
                    return

    def _tried(self, name: str) -> bool:
        """Try to prove a file; returns whether that is decided, one way or the other."""
        with self._news:
            prove = self._waiting.pop(name, None)
            if prove is None:  # another thread has it, or the commit
                return False
            self._at_work.add(name)
        proof, writer = None, False
        try:
            proof = prove()
        except Conflict:
            writer = True
        except (Refusal, OSError):
            pass
        finally:
            with self._news:
                self._at_work.discard(name)
                if proof is not None:
                    self._proofs[name] = proof
                elif writer and not self._ended:
                    self._waiting[name] = prove
                self._news.notify_all()
        return not writer
