"""Why was it so: the recorded decisions of a run or a call, and what would change a denial now."""

from contextlib import suppress
from typing import Any

from fastapi import APIRouter, Request

from control_plane.api import looking
from control_plane.api.context import Caller, SignedIn, declare
from control_plane.parts import Parts, parts_of
from control_plane.store import runs
from control_plane.store.db import reading
from control_plane.ticker import sequence
from interlock.call import Action, Call, Resource
from interlock.errors import NotFound, Refusal
from interlock.event import EventType
from interlock.tier import Tier
from policy.explain import explain
from policy.facts import Facts

router = APIRouter()
LOOK_BACK, KEPT = 5000, 1000
MAX_SHOWN = 100
_TOLD = (EventType.CALL_DECIDED, EventType.RUN_GRANTED, EventType.RUN_REFUSED, EventType.RUN_STARTED,
         EventType.RUN_ENDED, EventType.RUN_RESTARTED, EventType.RUN_KEY_REFUSED, EventType.LEASE_REFUSED)

declare({("GET", "/api/why/{what}"): Action.LOOK})


@router.get("/api/why/{what}")
def why(request: Request, caller: SignedIn, what: str) -> dict[str, Any]:
    """Return the decisions about a run (``run_…``) or one call (``call_…``), each with rule, bundle and next step."""
    parts = parts_of(request)
    with suppress(Refusal):  # a log that may not go on still tells what it has
        sequence(parts)
    if what.startswith("run_"):
        return _run(request, parts, caller, what)
    found = [e for e in _recent(parts) if e.get("call") == what]
    if not found:
        raise looking.unseen("call")
    own = any(str(e.get("actor")) in (caller.id, caller.person) for e in found)
    looking.require(request, caller, Resource("call", what, _tenant(found, caller), _tier(found)), own=own)
    return {"id": what, "decisions": [_decision(parts, e) for e in found if e["type"] == EventType.CALL_DECIDED]}


def _run(request: Request, parts: Parts, caller: Caller, run: str) -> dict[str, Any]:
    with reading(parts.engine) as connection:
        row = runs.one(connection, run)
    events = _told(parts, run)
    actors = {str(e.get("actor")) for e in events if e["type"] == EventType.CALL_DECIDED}
    own = row.owner == caller.person if row is not None else actors <= {caller.id, caller.person} and bool(actors)
    tenant, tier = (row.tenant, Tier(row.tier)) if row is not None else (_tenant(events, caller), _tier(events))
    looking.require(request, caller, Resource("run", run, tenant, tier), own=own)
    if row is None and not events:
        raise looking.unseen("run")
    asked = [e for e in events if e["type"] == EventType.CALL_DECIDED]
    told = [e for e in events if e["type"] != EventType.CALL_DECIDED]
    return {
        "id": run, "state": row.state if row is not None else "refused",
        "decisions": [_decision(parts, e) for e in asked[-MAX_SHOWN:]],
        "events": [{**{k: e[k] for k in ("type", "occurred_us", "actor")}, "facts": e.get("facts", {})}
                   for e in told[-MAX_SHOWN:]],
    }


def _told(parts: Parts, run: str) -> list[dict[str, Any]]:
    """Return the newest records that tell why a run is where it is, oldest first; its steps, however many, are not
    among them."""
    rows = [r for kind in _TOLD for r in parts.ledger.newest(limit=KEPT, run=run, type=kind.value)]
    return [r.event for r in sorted(rows, key=lambda r: r.index)]


def _tenant(events: list[dict[str, Any]], caller: Caller) -> str:
    """Return whose the events are; what nobody recorded is nobody else's."""
    return next((str(e["tenant"]) for e in events if e.get("tenant")), caller.tenant)


def _tier(events: list[dict[str, Any]]) -> Tier:
    """Return the highest tier that one of the recorded calls was about."""
    named = {e["facts"]["call"]["resource"]["tier"] for e in events if e["type"] == EventType.CALL_DECIDED}
    return next((t for t in (Tier.CRITICAL, Tier.HIGH) if t.value in named), Tier.NONE)


def _recent(parts: Parts) -> list[dict[str, Any]]:
    try:
        size = parts.ledger.head().size
    except NotFound:
        return []
    rows = parts.ledger.rows(after=max(-1, size - LOOK_BACK), limit=LOOK_BACK, type=EventType.CALL_DECIDED.value)
    return [r.event for r in rows]


def _decision(parts: Parts, event: dict[str, Any]) -> dict[str, Any]:
    """Return one recorded decision; for a denial also the nearest change, asked of the bundle in force now."""
    facts = event["facts"]
    shown = {"call": event.get("call", ""), "occurred_us": event["occurred_us"], "actor": event["actor"],
             "action": facts["call"]["action"], "resource": facts["call"]["resource"], **facts["decision"],
             "facts": facts["facts"]}
    if facts["decision"]["effect"] == "allow":
        return shown
    return {**shown, "changes": _changes(parts, facts)}


def _changes(parts: Parts, facts: dict[str, Any]) -> list[dict[str, str]]:
    known = facts["facts"]
    try:
        call = Call.from_json(facts["call"])
        read = Facts(**{**known, "roles": frozenset(known["roles"]), "programmes": frozenset(known["programmes"])})
        return [c.as_json() for c in explain(parts.slot.engine, call, read).changes]
    except (Refusal, TypeError, KeyError):
        return []  # recorded by another version; the decision itself is shown
