"""Queries on published policy bundles and on the versions of trust.json."""

import json
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from control_plane.store.tables import bundles, people, roles, trust_versions


def active(connection: Connection) -> Row[Any] | None:
    """Return the active bundle's row, or None for the empty slot."""
    return connection.execute(select(bundles).where(bundles.c.active)).one_or_none()


def publish(connection: Connection, version: int, digest: str, archive: bytes, by: str, now_us: int) -> None:
    """Insert a verified bundle and make it the one active bundle."""
    connection.execute(update(bundles).values(active=False))
    connection.execute(insert(bundles).values(
        version=version, digest=digest, archive=archive, published_by=by, published_us=now_us, active=True))


def newest_trust(connection: Connection) -> Row[Any] | None:
    """Return the newest trust version's row, or None."""
    return connection.execute(select(trust_versions).order_by(trust_versions.c.version.desc()).limit(1)).one_or_none()


def trust_after(connection: Connection, version: int) -> Row[Any] | None:
    """Return the row of the first trust version above `version`, or None."""
    wanted = select(trust_versions).where(trust_versions.c.version > version).order_by(trust_versions.c.version)
    return connection.execute(wanted.limit(1)).one_or_none()


def pinned(connection: Connection) -> dict[str, str]:
    """Return person → public key of the newest trust version: who may sign resumes and changes of this list."""
    row = newest_trust(connection)
    return {} if row is None else {str(p["person"]): str(p["key"]) for p in json.loads(row.body)["persons"]}


def add_trust(connection: Connection, version: int, body: dict[str, Any], approvals: list[Any], now_us: int) -> None:
    """Insert a trust version."""
    connection.execute(insert(trust_versions).values(
        version=version, body=json.dumps(body), approvals=json.dumps(approvals), made_us=now_us))


def officers(connection: Connection) -> list[tuple[str, str]]:
    """Return (person, public key) of every enabled safety officer who enrolled a key, oldest first."""
    rows = connection.execute(
        select(people.c.id, people.c.person_key, people.c.created_us)
        .join(roles, roles.c.person == people.c.id)
        .where((roles.c.role == "safety_officer") & people.c.disabled.is_(False) & (people.c.person_key != ""))
        .order_by(people.c.created_us, people.c.id).distinct())
    return [(str(r.id), str(r.person_key)) for r in rows]
