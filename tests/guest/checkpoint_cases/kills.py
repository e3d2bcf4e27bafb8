"""Against the real broker. SIGKILL at every point where a save writes, asks or flushes: a whole checkpoint always
loads, old or new."""

import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from running import fork, ranks, refusal_of, same, step

import interlock
from interlock import sealed, wire
from interlock.errors import Conflict

KILLS = 50


def _state(at: int) -> dict[str, Any]:
    return {"w": torch.full((3000,), float(at)), "deep": {"x": torch.full((2, 2), at), "at": at}}


def _save_and_die(at: int, point: int) -> int:
    """Save step `at`; die at write point `point`. Returns how many points there are, when it lived."""
    seen = 0

    def reached(half: Callable[[], object]) -> None:
        nonlocal seen
        if seen == point:
            half()
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def pwrite(fd: int, data: Any, offset: int) -> int:
        reached(lambda: os.pwrite(fd, data[: len(data) // 2], offset))
        return os.pwrite(fd, data, offset)

    def fsync(fd: int) -> None:
        reached(lambda: None)
        os.fsync(fd)
        reached(lambda: None)

    def exchange(message: bytes, *args: Any, **named: Any) -> Any:
        reached(lambda: None)
        reached(lambda: _send_only(message))
        found = kept(message, *args, **named)
        reached(lambda: None)
        return found

    kept = wire._exchange
    sealed.os, wire._exchange = _Os(pwrite, fsync), exchange
    try:
        while True:
            try:
                interlock.save(_state(at), at)
                return seen
            except Conflict as refusal:  # the broker still works on the commit of one that died
                if refusal.code != "conflict.saving":
                    raise
                time.sleep(0.05)
                seen = 0
    finally:
        sealed.os, wire._exchange = os, kept


def _send_only(message: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.connect(wire.socket_path())
        line.sendall(message)


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
    before = step()
    interlock.save(_state(before), before)
    chosen = random.Random(4)
    points = [*range(count), *(chosen.randrange(count) for _ in range(KILLS))][: max(KILLS, count)]
    outcomes, possible = set(), {before}
    for point in points:
        at = step()
        assert _die_at(at, point) == -signal.SIGKILL, point
        possible.add(at)  # a commit that was asked for may come through after the death
        into = _state(0)
        found = interlock.load(into)
        assert found in possible, (found, possible)
        assert into["deep"]["at"] == found
        assert bool((into["w"] == found).all())
        assert bool((into["deep"]["x"] == found).all())
        outcomes.add(found == at)
        possible = {s for s in possible if s >= found}
    assert outcomes == {True, False}  # some died before the commit, some after it


def case_the_real_broker_commits_and_gives_what_was_saved() -> None:
    def save() -> None:
        interlock.save(state, at, assets={"config.json": b"{}"})

    state = {"w": torch.randn(50_000), "none": torch.zeros(0, 3), "n": {"deep": (1, None)}}
    at = step()
    assert ranks(2, save, Path.cwd()) == [0, 0]
    into = {"w": torch.zeros(50_000), "none": torch.ones(0, 3), "n": {"deep": None}}
    assert interlock.latest() == at
    assert interlock.load(into) == at
    assert same(state["w"], into["w"])
    assert into["n"] == state["n"]
    assert interlock.asset("config.json") == b"{}"
    assert refusal_of(lambda: interlock.asset("other.json")) == "not_found.asset"
    assert refusal_of(lambda: interlock.save(state, at)) == "conflict.step"
    assert refusal_of(lambda: interlock.load(into, step=10**6)) == "not_found.checkpoint"


def case_a_writer_that_somebody_still_holds_fails_the_save() -> None:
    at, held = step(), []
    kept = sealed.Writer.finish

    def holding(self: Any, **named: Any) -> int:
        held.append(os.dup(self._fd))
        return kept(self, **named)

    sealed.Writer.finish = holding
    try:
        assert refusal_of(lambda: interlock.save(_state(at), at)) == "conflict.open_writer"
    finally:
        sealed.Writer.finish = kept
        for fd in held:
            os.close(fd)
    assert interlock.latest() != at
    interlock.save(_state(at), at)


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
