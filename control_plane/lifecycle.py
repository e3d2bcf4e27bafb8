"""What becomes of an attempt: placed → admitted → live → ended | stopped | refused; lost while nobody hears of it.

A node reports; the control plane believes only what concerns an attempt placed on that node, and an attempt
that is over stays over. ``lost`` is what pages show when nothing was heard for the tier's limit: it is no proof of
anything, and a later report replaces it.
"""

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.issuer import require_own
from control_plane.store import runs
from control_plane.store.db import now_us
from interlock.call import number, text
from interlock.errors import Malformed, NotFound
from interlock.order import Result

REPORTED = ("admitted", "live", "ended", "refused")
LOST_US = 60_000_000
KILLED = frozenset({"lease", "pipe", "start", "node_restarted"})
_OUTCOME = {"exit", "signal", "timed_out", "truncated_bytes", "result", "why"}


@dataclass(frozen=True)
class Report:
    """What a node says about an attempt: a state and, at the end, an outcome or an error."""

    state: str
    outcome: dict[str, Any] | None

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Report":
        """Parse the body of ``POST /node/runs/RUN/ATTEMPT/state``; raises Malformed."""
        state = text(value, "state", limit=16)
        if state not in REPORTED:
            raise Malformed("unknown state of a run", code="state")
        outcome, error = value.get("outcome"), value.get("error")
        if outcome is not None and not isinstance(outcome, dict):
            raise Malformed("an outcome is an object", code="outcome")
        if error is not None and not isinstance(error, dict):
            raise Malformed("an error is an object", code="outcome")
        found: dict[str, Any] | None = None
        if outcome is not None:
            found = {k: v for k, v in outcome.items() if k in _OUTCOME}
        if error is not None:
            found = {**(found or {}), "error": {k: error.get(k) for k in ("code", "message", "next_step")}}
        return cls(_final(state, found), found)


def _final(state: str, outcome: dict[str, Any] | None) -> str:
    """An attempt that was killed is ``stopped``, whatever its exit status: by an order, its lease, its closed pipe, a
    supervisor that started anew. Without the supervisor's proof that nothing of it lives it is ``lost``."""
    why, result = str((outcome or {}).get("why", "")), str((outcome or {}).get("result", ""))
    if state != "ended" or outcome is None:
        return state
    if result not in ("", Result.CONFIRMED.value):
        return "lost"
    return "stopped" if why.startswith("order:") or why in KILLED else state


def own_attempt(connection: Connection, node: str, run: str, attempt: int) -> Row[Any]:
    """Return the attempt's row; raises NotFound, or Denied (``denied.node``) when it is another node's."""
    row = runs.attempt(connection, run, number({"attempt": attempt}, "attempt", low=1, high=10_000))
    require_own(node, row)
    if row is None:
        raise NotFound("no such attempt", code="attempt")
    return row


def take(connection: Connection, node: str, run: str, attempt: int, report: Report) -> bool:
    """Apply a node's report; return whether anything changed."""
    row = own_attempt(connection, node, run, attempt)
    if row.state == report.state or (report.state == "admitted" and row.state == "live"):
        return False
    return runs.set_state(connection, run, attempt, report.state, now_us(), report.outcome)


def any_silent(connection: Connection) -> bool:
    """Return whether `lose_silent` would mark something."""
    return bool(runs.silent(connection, now_us() - LOST_US))


def lose_silent(connection: Connection) -> list[str]:
    """Mark open attempts without a sign for a while as ``lost``; return their runs."""
    lost = runs.silent(connection, now_us() - LOST_US)
    for row in lost:
        runs.set_state(connection, row.run, row.attempt, "lost", now_us())
    return [str(r.run) for r in lost]
