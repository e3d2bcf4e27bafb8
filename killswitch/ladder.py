"""The steps of an emergency stop, repeated until proof or the deadline (killswitch.md §3).

The latch came before; then, each pass: thaw (tasks that a v1 freezer holds take no SIGKILL) → pids.max 0 →
cgroup.kill → SIGKILL of run init by pidfd, which needs no control group → proof. No SIGTERM: a handler is
time to act for the adversary. No freeze: its tail is long and it buys nothing. A step that fails does not
keep the next from being tried.
"""

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from interlock.order import Result
from interlock.permit import boottime_ms
from killswitch.verify import Survivor, Target, proven, survivors

LIMIT_MS = 5_000  # the promise: by then an order is confirmed, or said not to be
CLIMB_MS = 4_700  # one ladder; it ends early enough to say who survived
_PAUSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)


@dataclass(frozen=True)
class Outcome:
    """What a ladder achieved. `why` is "" when confirmed, else what is missing; `removed` says that the
    group is gone by our own rmdir although something else is still missing."""

    result: Result
    found: int
    survivors: tuple[Survivor, ...]
    why: str
    removed: bool


def strike(target: Target) -> None:
    """Do one pass of thaw, pids.max 0 and both kill primitives."""
    steps: list[Callable[[], object]] = [
        target.group.thaw, lambda: target.group.set_pids_max(0), target.group.kill, lambda: _kill_init(target),
    ]
    for step in steps:
        with suppress(OSError):
            step()


def _kill_init(target: Target) -> None:
    if target.pidfd is not None:
        signal.pidfd_send_signal(target.pidfd, signal.SIGKILL)


def climb(target: Target, *, limit_ms: int = CLIMB_MS, removed: bool = False) -> Outcome:
    """Stop what `target` names and prove it; returns within `limit_ms` (plus one pass) whatever happens.

    A group that is on the books but not on the host is an error: nothing was killed, nothing is known;
    except (`removed`) when an earlier ladder took it away itself.
    """
    end = boottime_ms() + limit_ms
    if not target.group.exists() and not removed:
        return Outcome(Result.NOT_CONFIRMED, 0, tuple(survivors(target)), "the control group is not there", False)
    found = len(target.group.pids())
    passes = 0
    while True:
        strike(target)
        missing = proven(target)
        if not missing:
            return Outcome(Result.CONFIRMED, found, (), "", True)
        if boottime_ms() >= end:
            return Outcome(Result.NOT_CONFIRMED, found, tuple(survivors(target)), missing, missing != "group")
        time.sleep(_PAUSES[min(passes, len(_PAUSES) - 1)])
        passes += 1
