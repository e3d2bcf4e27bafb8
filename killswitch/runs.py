"""One attempt in the supervisor's memory: admitted → blocked → live → killing → gone. No way back.

Owned by the supervisor and changed under its lock only; the killing thread reads `target`.
"""

import os
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from killswitch.lease import Leash
from killswitch.page import DeadlineWriter
from killswitch.store import Entry
from killswitch.verify import Survivor, Target


class State(StrEnum):
    """Where an attempt stands (protocol.md §5)."""

    ADMITTED = "admitted"
    BLOCKED = "blocked"
    LIVE = "live"
    KILLING = "killing"
    GONE = "gone"


@dataclass
class Run:
    """An attempt. `leash` and `page` are None for what a sweep found; `pipe` is the writing end that run
    init watches: closing it ends the run; `swept` says that nobody of this supervisor's life admitted it."""

    entry: Entry
    state: State
    target: Target
    leash: Leash | None = None
    page: DeadlineWriter | None = None
    pipe: int | None = None
    why: str = ""
    missing: str = ""
    lost: bool = False
    removed: bool = False
    swept: bool = False
    survivors: tuple[Survivor, ...] = ()
    fds: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Return ``RUN.ATTEMPT``."""
        return self.entry.name

    @property
    def waits(self) -> bool:
        """Return whether the attempt may still be renewed."""
        return self.state in (State.ADMITTED, State.BLOCKED, State.LIVE)

    def begin_end(self, why: str) -> bool:
        """Enter KILLING; return False when it was entered before. Run init learns it by page and pipe."""
        if not self.waits:
            return False
        self.state, self.why = State.KILLING, why
        if self.page is not None:
            self.page.set(0)
        self._close_pipe()
        return True

    def _close_pipe(self) -> None:
        if self.pipe is not None:
            with suppress(OSError):
                os.close(self.pipe)
            self.pipe = None

    def finish(self) -> None:
        """Let go of what the attempt held; after the proof only."""
        self.state, self.survivors, self.missing = State.GONE, (), ""
        self._close_pipe()
        for fd in self.fds:
            with suppress(OSError):
                os.close(fd)
        self.fds.clear()
        if self.page is not None:
            self.page.remove()
            self.page = None

    def as_json(self) -> dict[str, Any]:
        """Return the row that `status` shows."""
        return {
            "run": self.entry.run, "attempt": self.entry.attempt, "state": self.state.value,
            "deadline_ms": self.leash.deadline_ms if self.leash and self.waits else 0,
            "owner": self.entry.labels.owner, "tier": self.entry.labels.tier.value, "why": self.why,
        }
