"""Queries on the database's copy of the order log, and on receipts."""

import json
from typing import Any

from sqlalchemy import Connection, Row, and_, insert, select, update

from control_plane.store.tables import orders, receipts
from interlock.order import ResumeOrder, StopOrder
from interlock.signed import Signed


def known(connection: Connection) -> dict[str, tuple[int, int]]:
    """Return id → (position in the order log or -1, epoch) of every order the database holds."""
    rows = connection.execute(select(orders.c.id, orders.c.n, orders.c.epoch))
    return {str(r.id): (int(r.n), int(r.epoch)) for r in rows}


def stops_signed(connection: Connection) -> list[str]:
    """Return the signed text of every stop."""
    return [str(s) for s in connection.execute(select(orders.c.signed).where(orders.c.kind == "stop")).scalars()]


def put_stop(connection: Connection, n: int, order: StopOrder, signed: Signed, now_us: int) -> bool:
    """Insert a stop, or set its position when it is known; return whether it was new."""
    return _put(connection, n, order.id, signed, now_us, {
        "kind": "stop", "epoch": order.epoch, "scope_kind": order.scope.kind.value, "scope_id": order.scope.id,
        "mode": order.mode.value, "actor": order.actor, "reason": order.reason,
    })


def put_resume(connection: Connection, n: int, order: ResumeOrder, signed: Signed, now_us: int) -> bool:
    """Insert a resume and mark the stops it names as cleared; return whether it was new."""
    fresh = _put(connection, n, order.id, signed, now_us, {
        "kind": "resume", "epoch": order.epoch, "scope_kind": "", "scope_id": "", "mode": "", "actor": "", "reason": "",
    })
    connection.execute(update(orders).where(orders.c.id.in_(order.clears)).values(cleared_by=order.id))
    return fresh


def _put(connection: Connection, n: int, order: str, signed: Signed, now_us: int, fields: dict[str, Any]) -> bool:
    present = connection.execute(select(orders.c.n).where(orders.c.id == order)).scalar_one_or_none()
    if present is not None:
        if n >= 0 and present != n:
            connection.execute(update(orders).where(orders.c.id == order).values(n=n, epoch=fields["epoch"]))
        return False
    connection.execute(insert(orders).values(
        id=order, n=n, signed=json.dumps(signed.as_json()), accepted_us=now_us, cleared_by="", **fields,
    ))
    return True


def stops(connection: Connection, limit: int = 200) -> list[Row[Any]]:
    """Return the newest stops, newest first."""
    return list(connection.execute(
        select(orders).where(orders.c.kind == "stop").order_by(orders.c.accepted_us.desc()).limit(limit)))


def one(connection: Connection, order: str) -> Row[Any] | None:
    """Return one order's row, or None."""
    return connection.execute(select(orders).where(orders.c.id == order)).one_or_none()


def receipts_of(connection: Connection, order: str) -> list[Row[Any]]:
    """Return the receipts of one stop, one a node."""
    return list(connection.execute(select(receipts).where(receipts.c.order == order).order_by(receipts.c.node)))


def put_receipt(
    connection: Connection, order: str, node: str, result: str, signed: Signed, facts: dict[str, Any], now_us: int
) -> None:
    """Keep a node's latest receipt for a stop."""
    same = and_(receipts.c.order == order, receipts.c.node == node)
    values = {"result": result, "signed": json.dumps(signed.as_json()), "facts": json.dumps(facts),
              "received_us": now_us}
    if connection.execute(update(receipts).where(same).values(**values)).rowcount == 0:
        connection.execute(insert(receipts).values(order=order, node=node, **values))
