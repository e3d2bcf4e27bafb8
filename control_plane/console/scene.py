"""What the pages and their live parts show, read from the store; no gate, no rendering."""

import base64
import json
from typing import Any

from audit.ledger import Row
from control_plane import proof
from control_plane.api import looking
from control_plane.api import nodes as nodes_api
from control_plane.api import status as status_api
from control_plane.api.runs import shown as as_json
from control_plane.auth.approvals import TRUST
from control_plane.console import curve
from control_plane.parts import Parts
from control_plane.store import nodes, orders, people, runs
from control_plane.store.db import reading
from interlock.errors import NotFound
from interlock.event import EventType
from interlock.signed import key_id, public_from_text

OPEN = runs.OPEN
TAIL_BYTES = 64 * 1024
ACTS = frozenset(t.value for t in (
    EventType.STOP_ACCEPTED, EventType.STOP_LOCAL, EventType.STOP_RECEIPT, EventType.STOP_UNCONFIRMED,
    EventType.RESUME_ASKED, EventType.RESUME_SIGNED, EventType.RESUME_ORDERED, EventType.APPROVAL_GIVEN,
    EventType.APPROVAL_REFUSED, EventType.INVITED, EventType.ENROLLED, EventType.BUNDLE_PUBLISHED,
    EventType.NODE_JOINED, EventType.NODE_REFUSED, EventType.TRUST_CHANGED, EventType.EXPORTED, EventType.INCIDENT,
    EventType.RECOVERING, EventType.STREAM_LOST, EventType.RUN_GRANTED,
))


def _head(parts: Parts) -> int:
    try:
        return parts.ledger.head().size
    except NotFound:
        return 0


def named(parts: Parts, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return runs with their owner's name and their command as one line."""
    with reading(parts.engine) as connection:
        names = {r["owner"]: people.by_id(connection, r["owner"]) for r in found}
    return [{**r, "owner_name": o.name if (o := names[r["owner"]]) else r["owner"], "command": " ".join(r["argv"])}
            for r in found]


def run(parts: Parts, shown: dict[str, Any]) -> dict[str, Any]:
    """Return one run with its owner's name and its outcome as text."""
    outcome = shown["outcome"] or {}
    said = ", ".join(f"{k} {v}" for k, v in outcome.items() if v not in (None, "", [], {}, False))
    return {**named(parts, [shown])[0], "outcome_text": said}


def run_row(parts: Parts, run_id: str) -> dict[str, Any]:
    """Return one run as the API shows it, without a gate (live parts). Raises NotFound."""
    with reading(parts.engine) as connection:
        row = runs.one(connection, run_id)
    if row is None:
        raise looking.unseen("run")
    return as_json(row)


def progress(found: dict[str, Any]) -> dict[str, Any]:
    """Return the curve and the checkpoints, newest first, of what the API tells of a run's progress."""
    kept = sorted(found["checkpoints"], key=lambda c: (c["step"], c["committed_us"]), reverse=True)
    return {"curve": curve.curve(found["points"], [c["step"] for c in kept]),
            "checkpoints": [{**c, "size": curve.size(c["bytes"])} for c in kept]}


def tail(parts: Parts, shown: dict[str, Any]) -> str:
    """Return the last part of a run's output as text; what is not UTF-8 is escaped."""
    return parts.output.tail(shown["run"], shown["attempt"], TAIL_BYTES).decode("utf-8", "backslashreplace")


def stops(parts: Parts) -> list[dict[str, Any]]:
    """Return all stops, newest first, with their proof."""
    with reading(parts.engine) as connection:
        return [_report(parts, connection, row) for row in orders.stops(connection)]


def _report(parts: Parts, connection: Any, row: Any) -> dict[str, Any]:
    found = proof.of_row(parts.desk, connection, row, silent_ms=parts.settings.silent_ms,
                         unconfirmed_ms=parts.settings.unconfirmed_ms)
    return {**found, "actor": _actor(connection, found["actor"])}


def _actor(connection: Any, actor: str) -> str:
    person = people.by_id(connection, actor.rpartition(":")[2])
    return person.name if person else actor


def stop(parts: Parts, order: str) -> dict[str, Any]:
    """Return one stop with the result of each node. Raises NotFound."""
    with reading(parts.engine) as connection:
        row = orders.one(connection, order)
        if row is None or row.kind != "stop":
            raise NotFound("no such stop", code="stop")
        return _report(parts, connection, row)


def scopes(parts: Parts, found: list[dict[str, Any]]) -> dict[str, list[str]]:
    """Return what can be named in a stop's scope besides runs."""
    with reading(parts.engine) as connection:
        joined = [n.id for n in nodes.every(connection)]
    return {"tenants": sorted({r["tenant"] for r in found}), "nodes": joined,
            "models": sorted({r["model"] for r in found if r["model"]})}


def status(parts: Parts, faults: dict[str, str]) -> dict[str, Any]:
    """Return what the Status page shows."""
    seen = status_api.seen(parts, faults)
    with reading(parts.engine) as connection:
        rows = [nodes_api.shown(n) for n in nodes.every(connection)]
    listed = stops(parts)
    counts = {tier: sum(r["count"] for r in seen["runs"] if r["tier"] == tier and r["state"] in OPEN)
              for tier in ("none", "high", "critical")}
    return {
        "armed": seen["armed"], "armed_why": _why_armed(seen), "last_stop": listed[0] if listed else None,
        "runs_by_tier": counts, "approvals_waiting": seen["approvals_waiting"], "head": seen["tree_head"],
        "streams_lost": len(parts.ledger.gaps()), "evidence_fault": faults.get("tree", ""),
        "recovering": seen["grants"]["why"] == "recovering",
        "trust_warning": seen["trust"]["warning"],
        "stops": [s for s in listed if not s["cleared_by"]], "acts": acts(parts),
        "nodes": [{**n, "id": n["node"]} for n in rows],
    }


def _why_armed(seen: dict[str, Any]) -> str:
    if not seen["nodes"]:
        return ""
    return ", ".join(f"{n['node']}: {'echo' if n['armed'] else 'no echo'}" for n in seen["nodes"])


def acts(parts: Parts, wanted: int = 20) -> list[dict[str, Any]]:
    """Return the newest privileged acts among the last thousand records, newest first."""
    rows = parts.ledger.rows(after=max(-1, _head(parts) - 1001), limit=1000)
    return [_row(parts, r) for r in reversed(rows) if r.event["type"] in ACTS][:wanted]


def records(parts: Parts, kind: str, run_id: str, before: int, page: int) -> tuple[list[dict[str, Any]], int]:
    """Return one page of records below index `before` (0: from the newest), and the next `before` (0: no more)."""
    filters = {name: value for name, value in (("type", kind), ("run", run_id)) if value}
    high = min(before or 1 << 62, _head(parts))
    step = page * 40
    found: list[Row] = []
    low = high
    while low > 0 and len(found) < page:
        low = max(0, high - step)
        piece = parts.ledger.rows(after=low - 1, below=high, limit=step, **filters)
        found += reversed(piece)
        high = low
    shown = found[:page]
    older = shown[-1].index if len(found) > page or (shown and low > 0) else 0
    return [_row(parts, r) for r in shown], older


def _row(parts: Parts, row: Row) -> dict[str, Any]:
    event = row.event
    with reading(parts.engine) as connection:
        actor = _actor(connection, str(event["actor"]))
    return {
        "log_index": row.index, "occurred_us": event["occurred_us"], "type": event["type"], "actor": actor,
        "run": event.get("run", ""), "node": row.node,
        "facts": json.dumps(event.get("facts", {}), indent=1, ensure_ascii=False, sort_keys=True),
    }


def pins(found: dict[str, Any]) -> list[dict[str, str]]:
    """Return the persons of a requested trust list with key id and what changes; empty for other requests."""
    if found["kind"] != TRUST:
        return []
    body = found["body"]
    fresh = {p["person"] for p in body["added"]}
    rows = [(p, "added" if p["person"] in fresh else "stays") for p in body["persons"]]
    return [{"name": p["name"], "key_id": key_id(public_from_text(p["key"])), "change": change}
            for p, change in (*rows, *((p, "removed") for p in body["removed"]))]


def picture(data: bytes) -> str:
    """Return a PNG as a data URI."""
    return "data:image/png;base64," + base64.b64encode(data).decode()
