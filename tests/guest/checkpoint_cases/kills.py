"""SIGKILL at every point where a save writes, asks or flushes: a whole checkpoint always loads, old or new."""

import os
import random
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
from running import fork, orders, step

import interlock
from interlock import sealed, wire

KILLS = 50


def _state(at: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(at)), "deep": {"x": torch.full((2, 2), at), "at": at}}


def _save_and_die(at: int, point: int) -> int:
    """Save step `at`; die at write point `point`. Returns how many points there are, when it lived."""
    seen = 0

    def counted(call: Callable[..., Any], half: bool) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            nonlocal seen
            if seen == point:
                if half:
                    call(args[0], args[1][: len(args[1]) // 2], *args[2:])
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            found = call(*args, **named)
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1
            return found

        return wrapped

    sealed.os = _Os(counted(os.pwrite, True), counted(os.fsync, False))
    wire._exchange = counted(wire._exchange, False)
    interlock.save(_state(at), at)
    return seen


class _Os:
    """`os` with two functions of ours."""

    def __init__(self, pwrite: Callable[..., Any], fsync: Callable[..., Any]) -> None:
        self.pwrite, self.fsync = pwrite, fsync

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)


def _die_at(at: int, point: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(fork(lambda: _save_and_die(at, point)), 0)[1])


def case_fifty_kills_leave_a_checkpoint_that_loads() -> None:
    count = _points()
    assert count > 20, count
    last = step()
    interlock.save(_state(last), last)
    chosen = random.Random(4)
    points = list(range(count)) + [chosen.randrange(count) for _ in range(KILLS)]
    outcomes = set()
    for point in points[: max(KILLS, count)]:
        at = step()
        assert _die_at(at, point) == -signal.SIGKILL, point
        into = _state(0)
        found = interlock.load(into)
        assert found in (last, at), (found, last, at)
        assert into["deep"]["at"] == found
        assert bool((into["w"] == found).all())
        assert bool((into["deep"]["x"] == found).all())
        outcomes.add(found == at)
        last = found
    assert outcomes == {True, False}  # some died before the commit, some after it
    assert orders()["staged"] <= 1


def _points() -> int:
    """Return how many points a save passes, from a child that lives."""
    at, (read, write) = step(), os.pipe()

    def tell() -> None:
        os.write(write, b"%d" % _save_and_die(at, -1))

    pid = fork(tell)
    os.close(write)
    assert os.waitpid(pid, 0)[1] == 0, sys.stderr
    with os.fdopen(read) as told:
        return int(told.read())
