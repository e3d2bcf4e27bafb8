"""The first screen in one answer, and a health check."""

from typing import Any

from fastapi import APIRouter, Request

from control_plane import trust_change, trust_list
from control_plane.api.context import SignedIn, declare, pass_gate
from control_plane.api.ledger import head_json
from control_plane.auth.site import state
from control_plane.parts import Parts, parts_of
from control_plane.scheduler import SEEN_US
from control_plane.store import approvals, nodes, runs
from control_plane.store.db import now_us, reading
from interlock.call import Action, Resource

router = APIRouter()
ECHO_US = 60_000_000

declare({("GET", "/healthz"): None, ("GET", "/api/status"): Action.LOOK})


@router.get("/healthz")
def health() -> dict[str, bool]:
    """Say that the program answers; it says nothing else."""
    return {"ok": True}


@router.get("/api/status")
def status(request: Request, caller: SignedIn) -> dict[str, Any]:
    """Return what the Status page shows."""
    pass_gate(request, caller, Action.LOOK, Resource("site", "status", caller.tenant), own=True)
    return seen(parts_of(request), getattr(request.app.state, "faults", {}))


def seen(parts: Parts, faults: dict[str, str]) -> dict[str, Any]:
    """Return the status facts. `armed` only while every joined node's supervisor echoed our very stop set lately."""
    now = now_us()
    with reading(parts.engine) as connection:
        standing = parts.desk.standing(connection)
        joined = [n for n in nodes.every(connection) if n.state == nodes.JOINED]
        counted, waiting, site = runs.count_by(connection), approvals.count_open(connection, now), state(connection)
        trust = trust_list.newest(connection)
        pinned, warning = len(trust.persons), trust_change.alarm(connection, trust)
    rows = [{
        "node": n.id, "fresh": now - n.seen_us < SEEN_US and now - n.supervisor_seen_us < SEEN_US,
        "armed": now - n.echo_us < ECHO_US, "seen_us": n.seen_us, "supervisor_seen_us": n.supervisor_seen_us,
    } for n in joined]
    return {
        "site": parts.settings.site, "state": site, "nodes": rows, "bundle": _bundle(parts),
        "armed": bool(rows) and all(r["armed"] for r in rows),
        "grants": {"ok": standing.grant_ok, "why": standing.why}, "epoch": standing.epoch,
        "stops": [{"order": s.id, "scope": str(s.scope), "actor": s.actor, "reason": s.reason}
                  for s in standing.active],
        "runs": [{"tier": t, "state": s, "count": c} for t, s, c in counted], "approvals_waiting": waiting,
        "trust": {"version": trust.version, "pinned": pinned, "safe": trust_list.SAFE, "warning": warning},
        "tree_head": head_json(parts.ledger), "cooldown_ms": parts.settings.cooldown_ms,
        "records_waiting": parts.desk.unrecorded(), "faults": dict(faults), "now_us": now,
    }


def _bundle(parts: Parts) -> dict[str, Any] | None:
    found = parts.slot.active
    if found is None:
        return None
    return {"version": found.version, "digest": found.digest, "not_after_us": found.not_after_us}
