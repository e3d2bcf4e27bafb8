"""What a node keeps fresh while it serves: entitlements, certificate, facts, the broker."""

import sys
import threading
import traceback
from collections.abc import Callable

from interlock.errors import Refusal
from interlock.permit import boottime_ms


class Chore:
    """One thing to repeat every `every_ms`; `failed` is its last refusal, None while it goes well."""

    def __init__(self, name: str, every_ms: int, do: Callable[[], object]) -> None:
        self.name, self._every_ms, self._do = name, every_ms, do
        self._next_ms = 0
        self.failed: Refusal | None = None

    def turn(self, now_ms: int) -> None:
        """Do it when it is time. A refusal waits for the next time; a fault of ours is printed, never hidden."""
        if now_ms < self._next_ms:
            return
        self._next_ms = now_ms + self._every_ms
        try:
            self._do()
            self.failed = None
        except Refusal as refusal:
            if self.failed is None:
                sys.stderr.write(f"{self.name}: {refusal}\n")
            self.failed = refusal
        except Exception:
            traceback.print_exc()


class Keeper(threading.Thread):
    """Turns its chores, one after the other, every quarter of a second."""

    def __init__(self, chores: list[Chore]) -> None:
        super().__init__(name="keeper", daemon=True)
        self._chores = chores
        self._end = threading.Event()

    def run(self) -> None:
        """Turn until `end`."""
        while not self._end.wait(0.25):
            for chore in self._chores:
                chore.turn(boottime_ms())

    def end(self) -> None:
        """Stop after the chore at hand; a chore waits for an answer 10 s at most."""
        self._end.set()
        self.join(10.0)
