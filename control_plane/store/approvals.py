"""Queries about approval requests and votes. UNIQUE(request, person) alone decides between parallel votes."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from control_plane.store.tables import approval_requests, approval_votes, orders, people, runs, versions

OPEN, USED, REFUSED = "open", "used", "refused"


@dataclass(frozen=True)
class Request:
    """One approval request. `kind` launch, resume, trust or version; `body` the object whose `digest` is voted on.

    `head` is what it is bound to besides: the head of the order log (resume), the list in force (trust), or nothing.
    """

    id: str
    kind: str
    digest: str
    body: dict[str, Any]
    tenant: str
    asked_by: str
    owner: str
    reason: str
    needed: int
    asked_us: int
    expires_us: int
    state: str
    head: str


@dataclass(frozen=True)
class Vote:
    """One person's vote; `signed` the Signed resume approval as JSON, None for other kinds."""

    person: str
    name: str
    approve: bool
    reason: str
    signed: dict[str, Any] | None
    at_us: int


def _request(row: Row[Any]) -> Request:
    return Request(**{**row._mapping, "body": json.loads(row.body)})


def add(connection: Connection, request: Request) -> None:
    """Insert a request."""
    connection.execute(insert(approval_requests).values(**{**vars(request), "body": json.dumps(request.body)}))


def one(connection: Connection, request: str) -> Request | None:
    """Return the request of that id."""
    row = connection.execute(select(approval_requests).where(approval_requests.c.id == request)).one_or_none()
    return None if row is None else _request(row)


def newest(connection: Connection, *, asked_by: str = "", limit: int = 200) -> list[Request]:
    """Return requests, newest first; with `asked_by` only that person's."""
    wanted = select(approval_requests).order_by(approval_requests.c.asked_us.desc(), approval_requests.c.id)
    if asked_by:
        wanted = wanted.where(approval_requests.c.asked_by == asked_by)
    return [_request(row) for row in connection.execute(wanted.limit(limit))]


def same(connection: Connection, kind: str, digest: str, asked_by: str, now_us: int) -> Request | None:
    """Return the open request of that person for exactly this digest, if there is one."""
    wanted = select(approval_requests).where(
        approval_requests.c.kind == kind, approval_requests.c.digest == digest,
        approval_requests.c.asked_by == asked_by, approval_requests.c.state == OPEN,
        approval_requests.c.expires_us > now_us,
    ).order_by(approval_requests.c.asked_us.desc())
    row = connection.execute(wanted).first()
    return None if row is None else _request(row)


def count_open(connection: Connection, now_us: int) -> int:
    """Return how many requests wait for votes."""
    wanted = select(approval_requests.c.id).where(
        approval_requests.c.state == OPEN, approval_requests.c.expires_us > now_us
    )
    return len(connection.execute(wanted).all())


def close(connection: Connection, request: str, state: str) -> bool:
    """Move an open request to `state` in one statement; False when it was not open."""
    done = connection.execute(
        update(approval_requests).where(approval_requests.c.id == request, approval_requests.c.state == OPEN)
        .values(state=state)
    )
    return done.rowcount == 1


def add_vote(
    connection: Connection, request: str, person: str, *, approve: bool, reason: str, signed: dict[str, Any] | None,
    now_us: int,
) -> None:
    """Insert a vote; IntegrityError when this person has voted."""
    text = "" if signed is None else json.dumps(signed)
    connection.execute(insert(approval_votes).values(
        request=request, person=person, approve=approve, reason=reason, signed=text, at_us=now_us
    ))


def votes(connection: Connection, request: str) -> list[Vote]:
    """Return the votes on a request in the order in which they came."""
    wanted = (
        select(approval_votes, people.c.name).join(people, people.c.id == approval_votes.c.person)
        .where(approval_votes.c.request == request).order_by(approval_votes.c.id)
    )
    return [
        Vote(r.person, r.name, r.approve, r.reason, json.loads(r.signed) if r.signed else None, r.at_us)
        for r in connection.execute(wanted)
    ]


def stopped_by(connection: Connection, stops: Iterable[str]) -> frozenset[str]:
    """Return the actors of these stop orders, and the owners of the runs that they name."""
    found = connection.execute(select(orders).where(orders.c.id.in_(list(stops)), orders.c.kind == "stop")).all()
    named = [row.scope_id for row in found if row.scope_kind == "run"]
    owners = connection.execute(select(runs.c.owner).where(runs.c.id.in_(named))).scalars()
    return frozenset(row.actor for row in found) | frozenset(owners)


def made_by(connection: Connection, version: str) -> frozenset[str]:
    """Return who registered that version and who owns its run."""
    found = select(versions.c.created_by, runs.c.owner).join(runs, runs.c.id == versions.c.run)
    row = connection.execute(found.where(versions.c.digest == version)).one_or_none()
    return frozenset() if row is None else frozenset({str(row.created_by), str(row.owner)})
