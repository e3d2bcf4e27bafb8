"""Is it stopped? Only receipts that a supervisor signed say so, and only from every node that must answer.

Rules (protocol.md §7, §8):
1. Who must answer comes from the ORDER LOG's lists, never from the database's (G9): for one run, the nodes
   that were ever given an attempt of it, as the order log's placements say; for every other scope, and for a
   run that the placements do not know, every node that ever joined.
2. ``confirmed`` needs a CONFIRMED receipt of each of them. One NOT_CONFIRMED is ``not_confirmed``.
3. A node that is silent is ``unreachable`` when nothing of it was heard for a while; an expired lease proves
   nothing. Before that the state is ``pending``.
"""

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.desk import OrderDesk
from control_plane.store import nodes, orders
from control_plane.store.db import now_us
from interlock.call import text
from interlock.errors import Malformed, NotFound, Unavailable
from interlock.event import Event, EventType
from interlock.order import Result, Scope, ScopeKind
from interlock.signed import RECEIPT, Signed, verify

_KEPT = ("runs", "survivors", "at_ms", "boot_id", "why", "latency_ms")


def must_answer(desk: OrderDesk, scope: Scope) -> set[str]:
    """Return the nodes whose receipts a stop of `scope` needs. Raises Unavailable (order log away)."""
    enrolled = {str(r["node"]) for r in desk.log.enrolled()}
    if scope.kind is ScopeKind.NODE:
        return enrolled & {scope.id} or enrolled
    placed = desk.log.placed(scope.id) if scope.kind is ScopeKind.RUN else set()
    return placed or enrolled


def take_receipt(desk: OrderDesk, connection: Connection, node: str, signed: Signed) -> str:
    """Keep a receipt of `node`; return the id of its order.

    Raises Untrusted (not signed by that node's supervisor, or about another node) or Malformed.
    """
    body = verify(signed, RECEIPT, desk.supervisor_pins(node))
    order, result = text(body, "order", limit=64), Result(text(body, "result", limit=32))
    if text(body, "node", limit=64) != node:
        raise Malformed("a receipt is about another node", code="receipt")
    facts: dict[str, Any] = {k: body[k] for k in _KEPT if k in body}
    held = {r.node: r for r in orders.receipts_of(connection, order)}.get(node)
    if held is not None and _older(facts, json.loads(held.facts)):
        return order
    orders.put_receipt(connection, order, node, result.value, signed, facts, now_us())
    changed = held is None or held.result != result.value
    if changed:
        desk.note(Event(EventType.STOP_RECEIPT, f"node/{node}", facts={
            "order": order, "node": node, "result": result.value, "receipt": facts}))
    return order


def _older(fresh: dict[str, Any], held: dict[str, Any]) -> bool:
    """Two carriers may bring receipts in the wrong order; within one boot the supervisor's own clock decides."""
    same_boot = fresh.get("boot_id") == held.get("boot_id")
    return same_boot and int(fresh.get("at_ms", 0)) < int(held.get("at_ms", 0))


def state_of(
    results: Mapping[str, str], needed: set[str], reachable: set[str], *, waited: bool
) -> str:
    """Return ``confirmed``, ``not_confirmed``, ``unreachable`` or ``pending``.

    Args: `results` node → result of its latest receipt; `waited` whether the time for a proof has passed.
    """
    if Result.NOT_CONFIRMED.value in results.values():
        return "not_confirmed"
    missing = {n for n in needed if results.get(n) != Result.CONFIRMED.value}
    if not missing:
        return "confirmed"
    if not waited:
        return "pending"
    return "not_confirmed" if missing & reachable else "unreachable"


def report(
    desk: OrderDesk, connection: Connection, order: str, *, silent_ms: int, unconfirmed_ms: int
) -> dict[str, Any]:
    """Return what is known about one stop (shape: 0001-seams §5). Raises NotFound."""
    row = orders.one(connection, order)
    if row is None or row.kind != "stop":
        raise NotFound("no such stop", code="stop")
    return of_row(desk, connection, row, silent_ms=silent_ms, unconfirmed_ms=unconfirmed_ms)


def of_row(
    desk: OrderDesk, connection: Connection, row: Row[Any], *, silent_ms: int, unconfirmed_ms: int
) -> dict[str, Any]:
    """Return the report of a stop's row."""
    scope = Scope.from_json({"kind": row.scope_kind, "id": row.scope_id})
    receipts = {r.node: r for r in orders.receipts_of(connection, row.id)}
    now = now_us()
    try:
        needed = must_answer(desk, scope)
    except Unavailable:
        needed = {"order-log"}  # nobody can say who must answer, so nothing is proven
    heard = {n.id for n in nodes.every(connection)
             if now - max(n.supervisor_seen_us, n.seen_us) < silent_ms * 1000}
    waited = now - row.accepted_us >= unconfirmed_ms * 1000
    state = state_of({n: r.result for n, r in receipts.items()}, needed, heard, waited=waited)
    lines = [_line(n, receipts.get(n), row.accepted_us, reachable=n in heard) for n in sorted(needed | set(receipts))]
    latencies = [line["latency_ms"] for line in lines if line["latency_ms"] is not None]
    return {
        "order": row.id, "scope": str(scope), "actor": row.actor, "reason": row.reason, "state": state,
        "nodes": lines, "accepted_us": row.accepted_us, "epoch": row.epoch, "anchored": row.n >= 0,
        "confirmed_ms": max(latencies) if state == "confirmed" and latencies else None, "cleared_by": row.cleared_by,
    }


def _line(node: str, receipt: Row[Any] | None, accepted_us: int, *, reachable: bool) -> dict[str, Any]:
    if receipt is None:
        return {"node": node, "result": "pending" if reachable else "unreachable", "latency_ms": None,
                "survivors": [], "runs": []}
    facts = json.loads(receipt.facts)
    return {"node": node, "result": receipt.result, "latency_ms": max(0, (receipt.received_us - accepted_us) // 1000),
            "node_ms": facts.get("latency_ms"), "survivors": facts.get("survivors", []), "runs": facts.get("runs", []),
            "why": facts.get("why", "")}
