"""Queries on runs, their attempts and their code files."""

import json
from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, case, func, insert, or_, select, update

from control_plane.store.tables import attempts, code_files, people, runs
from interlock.order import LaunchOrder
from interlock.signed import Signed

OPEN = ("placed", "admitted", "live")
OVER = ("ended", "stopped", "refused")
LOST = "lost"


def add_run(connection: Connection, run: str, launch: LaunchOrder, approval: str, now_us: int) -> None:
    """Insert a run with its plan; its first attempt follows by `add_attempt`."""
    labels = launch.labels
    connection.execute(insert(runs).values(
        id=run, tenant=labels.tenant, subject=labels.subject, owner=labels.owner, tier=labels.tier.value,
        model=labels.model, plan=json.dumps(launch.plan.as_json()), plan_digest=launch.plan.digest(), approval=approval,
        state="placed", attempt=launch.attempt, node=labels.node, created_us=now_us, ended_us=0, outcome=""))


def add_attempt(connection: Connection, launch: LaunchOrder, signed: Signed, now_us: int) -> None:
    """Insert an attempt with its signed launch order and make it the run's current one."""
    connection.execute(insert(attempts).values(
        run=launch.run, attempt=launch.attempt, node=launch.labels.node, launch=json.dumps(signed.as_json()),
        labels=json.dumps(launch.labels.as_json()), epoch=launch.epoch, state="placed", granted_us=now_us, live_us=0,
        lease_us=0, ended_us=0, outcome=""))
    connection.execute(update(runs).where(runs.c.id == launch.run).values(
        state="placed", attempt=launch.attempt, node=launch.labels.node, ended_us=0, outcome=""))


def one(connection: Connection, run: str) -> Row[Any] | None:
    """Return one run's row, or None."""
    return connection.execute(select(runs).where(runs.c.id == run)).one_or_none()


def kinds(connection: Connection) -> list[tuple[str, str]]:
    """Return each (tenant, tier) of any run."""
    return [(str(r.tenant), str(r.tier)) for r in connection.execute(select(runs.c.tenant, runs.c.tier).distinct())]


def newest(connection: Connection, limit: int, owner: str, seen: Iterable[tuple[str, str]]) -> list[Row[Any]]:
    """Return the runs of `owner` and those of each (tenant, tier) in `seen`, newest first."""
    theirs = [(runs.c.tenant == tenant) & (runs.c.tier == tier) for tenant, tier in seen]
    query = select(runs).where(or_(runs.c.owner == owner, *theirs))
    return list(connection.execute(query.order_by(runs.c.created_us.desc()).limit(limit)))


def attempt(connection: Connection, run: str, number: int) -> Row[Any] | None:
    """Return one attempt's row, or None."""
    return connection.execute(
        select(attempts).where((attempts.c.run == run) & (attempts.c.attempt == number))).one_or_none()


def attempts_of(connection: Connection, run: str) -> list[Row[Any]]:
    """Return the attempts of one run in order."""
    return list(connection.execute(select(attempts).where(attempts.c.run == run).order_by(attempts.c.attempt)))


def waiting(connection: Connection, node: str, since_us: int) -> list[Row[Any]]:
    """Return the attempts placed on `node` whose state it has not reported and whose grant is still young."""
    return list(connection.execute(select(attempts).where(
        (attempts.c.node == node) & (attempts.c.state == "placed") & (attempts.c.granted_us > since_us)
    ).order_by(attempts.c.granted_us)))


def leased(connection: Connection, run: str, number: int, now_us: int) -> None:
    """Note a lease; the first one makes the attempt live, and one that counted as lost is live again."""
    same = (attempts.c.run == run) & (attempts.c.attempt == number)
    first = case((attempts.c.live_us == 0, now_us), else_=attempts.c.live_us)
    connection.execute(update(attempts).where(same).values(lease_us=now_us, live_us=first))
    if connection.execute(update(attempts).where(same & (attempts.c.state == LOST)).values(state="live")).rowcount:
        current = (runs.c.id == run) & (runs.c.attempt == number)
        connection.execute(update(runs).where(current & (runs.c.state == LOST)).values(state="live"))


def set_state(
    connection: Connection, run: str, number: int, state: str, now_us: int, outcome: dict[str, Any] | None = None
) -> bool:
    """Move an attempt that is not over yet (and its run, when current); return whether anything moved."""
    over = state in OVER
    values: dict[str, Any] = {"state": state, "ended_us": now_us if over else 0}
    if outcome is not None:
        values["outcome"] = json.dumps(outcome)
    same = (attempts.c.run == run) & (attempts.c.attempt == number) & attempts.c.state.not_in(OVER)
    moved = connection.execute(update(attempts).where(same).values(**values)).rowcount == 1
    if moved:
        connection.execute(update(runs).where((runs.c.id == run) & (runs.c.attempt == number)).values(**values))
    return moved


def ended_since(connection: Connection, since_us: int) -> list[Row[Any]]:
    """Return the runs that ended by themselves after `since_us`, the first to end first."""
    late = (runs.c.state == "ended") & (runs.c.ended_us > since_us)
    return list(connection.execute(select(runs).where(late).order_by(runs.c.ended_us)))


def note_outcome(connection: Connection, run: str, number: int, before: str, outcome: str) -> bool:
    """Replace the outcome (JSON) of a run that ended with attempt `number`; False when it moved on from `before`."""
    same = (runs.c.id == run) & (runs.c.attempt == number) & (runs.c.state == "ended") & (runs.c.outcome == before)
    return connection.execute(update(runs).where(same).values(outcome=outcome)).rowcount == 1


def silent(connection: Connection, before_us: int) -> list[Row[Any]]:
    """Return open attempts whose last sign (lease or grant) is older than `before_us`."""
    return list(connection.execute(select(attempts).where(
        attempts.c.state.in_(OPEN) & (attempts.c.lease_us < before_us) & (attempts.c.granted_us < before_us))))


def labels_of_all(connection: Connection) -> list[dict[str, Any]]:
    """Return the labels of every attempt that was ever granted."""
    return [json.loads(r.labels) for r in connection.execute(select(attempts.c.labels))]


def disabled(connection: Connection, person: str) -> bool:
    """Return whether that person is disabled or unknown."""
    found = connection.execute(select(people.c.disabled).where(people.c.id == person)).scalar_one_or_none()
    return found is None or bool(found)


def count_by(connection: Connection) -> list[tuple[str, str, int]]:
    """Return (tier, state, number) over all runs."""
    rows = connection.execute(select(runs.c.tier, runs.c.state, func.count()).group_by(runs.c.tier, runs.c.state))
    return [(str(t), str(s), int(n)) for t, s, n in rows]


def has_code(connection: Connection, digest: str) -> bool:
    """Return whether a code file of that digest was uploaded."""
    return connection.execute(select(code_files.c.digest).where(code_files.c.digest == digest)).first() is not None


def code(connection: Connection, digest: str) -> bytes | None:
    """Return a code file's bytes, or None."""
    found = connection.execute(select(code_files.c.data).where(code_files.c.digest == digest)).scalar_one_or_none()
    return None if found is None else bytes(found)


def put_code(connection: Connection, digest: str, data: bytes, by: str, now_us: int) -> None:
    """Keep a code file; the same bytes twice are one row."""
    if not has_code(connection, digest):
        connection.execute(insert(code_files).values(digest=digest, data=data, by=by, at_us=now_us))


def code_size(connection: Connection, by: str) -> int:
    """Return how many bytes of code files that person uploaded."""
    size = select(func.coalesce(func.sum(func.length(code_files.c.data)), 0)).where(code_files.c.by == by)
    return int(connection.execute(size).scalar_one())


def needs_code(connection: Connection, node: str, digest: str) -> bool:
    """Return whether an attempt on `node` names that code file in its plan."""
    rows = connection.execute(
        select(runs.c.plan).join(attempts, attempts.c.run == runs.c.id).where(attempts.c.node == node).distinct())
    return any(digest in {f["digest"] for f in json.loads(r.plan)["code"]} for r in rows)


def open_by_node(connection: Connection) -> dict[str, int]:
    """Return node → number of open attempts."""
    rows = connection.execute(
        select(attempts.c.node, func.count()).where(attempts.c.state.in_(OPEN)).group_by(attempts.c.node))
    return {str(n): int(c) for n, c in rows}
