"""Queries on nodes and join secrets. Only the SHA-256 of a secret is kept."""

import hashlib
import json
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from control_plane.store.tables import join_secrets, nodes

JOINED, REVOKED = "joined", "revoked"


def _hash(secret: str) -> str:
    return "sha256:" + hashlib.sha256(secret.encode()).hexdigest()


def add_secret(connection: Connection, secret: str, node: str, made_by: str, expires_us: int) -> None:
    """Keep a new join secret's hash for `node`."""
    connection.execute(insert(join_secrets).values(
        hash=_hash(secret), node=node, made_by=made_by, expires_us=expires_us, used_us=0))


def use_secret(connection: Connection, secret: str, now_us: int) -> str | None:
    """Use a secret up in one statement and return its node; None when unknown, used or expired."""
    unused = (join_secrets.c.used_us == 0) & (join_secrets.c.expires_us > now_us)
    fresh = (join_secrets.c.hash == _hash(secret)) & unused
    if connection.execute(update(join_secrets).where(fresh).values(used_us=now_us)).rowcount != 1:
        return None
    found = connection.execute(select(join_secrets.c.node).where(join_secrets.c.hash == _hash(secret))).scalar_one()
    return str(found)


def add(connection: Connection, node: str, supervisor_key: str, now_us: int) -> None:
    """Insert a joined node."""
    connection.execute(insert(nodes).values(
        id=node, supervisor_key=supervisor_key, state=JOINED, joined_us=now_us, seen_us=now_us,
        supervisor_seen_us=0, boot_id="", facts="{}", echo_us=0))


def one(connection: Connection, node: str) -> Row[Any] | None:
    """Return one node's row, or None."""
    return connection.execute(select(nodes).where(nodes.c.id == node)).one_or_none()


def every(connection: Connection) -> list[Row[Any]]:
    """Return all nodes by id."""
    return list(connection.execute(select(nodes).order_by(nodes.c.id)))


def seen(connection: Connection, node: str, now_us: int) -> None:
    """Note that the node program was heard."""
    connection.execute(update(nodes).where(nodes.c.id == node).values(seen_us=now_us))


def beat(connection: Connection, node: str, boot_id: str, now_us: int, *, echo: bool) -> None:
    """Note a heartbeat; `echo` when the node has applied every order we know."""
    values: dict[str, Any] = {"supervisor_seen_us": now_us, "boot_id": boot_id}
    if echo:
        values["echo_us"] = now_us
    connection.execute(update(nodes).where(nodes.c.id == node).values(**values))


def set_facts(connection: Connection, node: str, facts: dict[str, Any], now_us: int) -> None:
    """Keep what the node reports about itself."""
    connection.execute(update(nodes).where(nodes.c.id == node).values(facts=json.dumps(facts), seen_us=now_us))


def revoke(connection: Connection, node: str) -> bool:
    """Refuse this node from now on; return whether it was joined."""
    return connection.execute(
        update(nodes).where((nodes.c.id == node) & (nodes.c.state == JOINED)).values(state=REVOKED)).rowcount == 1
