"""What the broker knows of one run and how it answers it: pure, no socket, no clock of its own.

The rules, for each request:
1. The peer's uid, as the host sees it, is the run's uid: the socket alone proves nothing, a descriptor can
   be handed on.
2. The lease lives and no stop order covers the run; asked anew for each request.
3. Only then is the request read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from interlock.call import number, text, texts
from interlock.errors import Halted, Malformed, NotFound, TooMany, Untrusted
from interlock.order import Labels, StopOrder
from interlock.tier import Tier

METRICS = 16
STEPS_PER_S = 50
SUMMARY_MS = 1_000
_METRIC = re.compile(r"^[a-z][a-z0-9_]{0,39}$")


@dataclass(frozen=True)
class Granted:
    """What the plan lets a run save and load, as the launcher read it in the launch order.

    `weights` the versions that it may load; `bound` the plan's digest; `told` what the control plane knew when it
    signed, at `opened_ms` (CLOCK_BOOTTIME) at the latest.
    """

    checkpoints: bool = False
    weights: tuple[str, ...] = ()
    model: str = ""
    serve: bool = False
    bound: str = ""
    told: Mapping[str, Any] = field(default_factory=dict)
    opened_ms: int = 0


def granted_of(request: Mapping[str, Any], now_ms: int) -> Granted:
    """Parse `plan` and `told` of the launcher's ``open``; without them nothing is granted. Raises Malformed."""
    plan, told = request.get("plan"), request.get("told")
    if plan is None:
        return Granted()
    if not isinstance(plan, dict) or not isinstance(told, dict):
        raise Malformed("plan and told facts are objects", code="wire")
    return Granted(
        plan.get("checkpoints") is True, texts(plan, "weights", limit=8), text(plan, "model", empty=True),
        plan.get("serve") is True, text(plan, "digest", limit=80), told, now_ms,
    )


@dataclass
class Answer:
    """The fields of a reply and, with some, one open descriptor, which whoever sends it closes."""

    fields: dict[str, Any]
    fd: int = -1


@dataclass(frozen=True)
class Later:
    """A reply that needs files read: `work` runs beside the loop, `ended` in the loop after it, whatever came."""

    work: Callable[[], Answer]
    ended: Callable[[], None]


@dataclass
class Guest:
    """One attempt. `steps` counts all, `unrecorded` those since the last record, `recorded_ms` when that was."""

    run: str
    attempt: int
    uid: int
    labels: Labels
    steps: int = 0
    last: int = 0
    unrecorded: int = 0
    recorded_ms: int = -SUMMARY_MS
    window_ms: int = 0
    in_window: int = 0
    live: bool = field(default=True)
    granted: Granted = field(default_factory=Granted)


def check_peer(guest: Guest, uid: int) -> None:
    """Refuse a peer that does not run under the run's own uid. Raises Untrusted (``untrusted.peer``)."""
    if uid != guest.uid:
        raise Untrusted("this socket belongs to another run", code="peer",
                        next_step="connect from inside the run")


def check_leash(order: StopOrder | None, lease_over: bool) -> None:
    """Refuse when a stop order covers the run or its deadline has passed. Raises Halted."""
    if order is not None:
        raise Halted("a stop order covers this run", details={"order": order.id})
    if lease_over:
        raise Halted("the lease of this run is gone", code="lease")


def leash(
    stopped: Callable[[Labels], StopOrder | None], lease_over: Callable[[str, int], bool]
) -> Callable[[Guest], None]:
    """Return the question that is asked before anything is done for a guest; it raises Halted."""

    def check(guest: Guest) -> None:
        if not guest.live:
            raise Halted("this attempt is over", code="lease")
        check_leash(stopped(guest.labels), lease_over(guest.run, guest.attempt))

    return check


def answer(guest: Guest, request: dict[str, Any], now_ms: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Return the reply to one request and the facts of the record that must be durable before it is sent.

    Args: `now_ms` CLOCK_BOOTTIME. Raises Malformed, TooMany, NotFound (unknown op).
    """
    op = request.get("op")
    if op == "status":
        state = {"run": guest.run, "attempt": guest.attempt, "state": "live", "steps": guest.steps}
        return state, None
    if op == "step":
        return _step(guest, request, now_ms)
    raise NotFound("the broker has no such operation", code="op", next_step="see docs/formats/wire.md")


def _step(guest: Guest, request: dict[str, Any], now_ms: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
    n = number(request, "n")
    metrics = _metrics(request.get("metrics", {}))
    _throttle(guest, now_ms)
    guest.steps += 1
    guest.unrecorded += 1
    guest.last = n
    # by summary below tier high, in full from there on (runners.md, "Life of a run")
    if guest.labels.tier is Tier.NONE and now_ms - guest.recorded_ms < SUMMARY_MS:
        return {"n": n, "recorded": False}, None
    facts = {"attempt": guest.attempt, "n": n, "steps": guest.unrecorded, "metrics": metrics}
    guest.recorded_ms, guest.unrecorded = now_ms, 0
    return {"n": n, "recorded": True}, facts


def _throttle(guest: Guest, now_ms: int) -> None:
    if guest.labels.tier is Tier.NONE:
        return
    if now_ms - guest.window_ms >= 1_000:
        guest.window_ms, guest.in_window = now_ms, 0
    guest.in_window += 1
    if guest.in_window > STEPS_PER_S:
        raise TooMany("more steps a second than are recorded in full", code="steps",
                      next_step="report every n-th step", details={"retry_after_s": 1})


def _metrics(value: object) -> dict[str, int]:
    if not isinstance(value, dict) or len(value) > METRICS:
        raise Malformed(f"metrics are an object of at most {METRICS} integers", code="wire")
    for name in value:
        if not _METRIC.match(str(name)):
            raise Malformed("a metric's name is not lower-case letters, digits and '_'", code="wire")
        number(value, name, low=-(2**53) + 1)
    return value
