"""How a run is getting on: the steps that it reported and the checkpoints that it committed."""

from typing import Any

from fastapi import APIRouter, Request

from control_plane.api import looking
from control_plane.api.context import SignedIn, declare
from control_plane.api.runs import Id
from control_plane.parts import Parts, parts_of
from control_plane.store import checkpoints, runs
from control_plane.store.db import reading
from control_plane.ticker import sequence
from interlock.call import Action, Resource
from interlock.errors import Refusal
from interlock.event import EventType
from interlock.tier import Tier

router = APIRouter()
MAX_POINTS = 5000

declare({("GET", "/api/runs/{run}/progress"): Action.LOOK})


@router.get("/api/runs/{run}/progress")
def progress(request: Request, caller: SignedIn, run: Id) -> dict[str, Any]:
    """Return ``points`` (the newest 5000 recorded steps in order of their records) and ``checkpoints`` by step."""
    parts = parts_of(request)
    with reading(parts.engine) as connection:
        row = runs.one(connection, run)
    if row is None:
        raise looking.unseen("run")
    looking.require(request, caller, Resource("run", row.id, row.tenant, Tier(row.tier)),
                    own=row.owner == caller.person)
    with reading(parts.engine) as connection:
        kept = checkpoints.of_run(connection, run)
    return {"points": _points(parts, run), "checkpoints": [
        {"digest": c.digest, "step": c.step, "attempt": c.attempt, "kind": c.kind, "items": c.items,
         "bytes": c.bytes, "committed_us": c.committed_us} for c in kept]}


def _points(parts: Parts, run: str) -> list[dict[str, Any]]:
    try:
        sequence(parts)
    except Refusal:  # a log that may not go on still tells what it has
        pass
    return [_point(row.event) for row in parts.ledger.newest(limit=MAX_POINTS, run=run, type=EventType.RUN_STEP.value)]


def _point(event: dict[str, Any]) -> dict[str, Any]:
    facts = event.get("facts", {})
    return {"n": facts.get("n", 0), "attempt": facts.get("attempt", 1), "at_us": event.get("occurred_us", 0),
            "metrics": facts.get("metrics", {})}
