"""Queries about models, their versions and their engines. Each takes the caller's open transaction.

A move of a version is ONE statement whose row count decides: of two at once, one wins.
"""

import json
from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, Row, and_, exists, func, insert, select, update

from control_plane.store.tables import attempts, engines, models, people, run_keys, runs, versions

DRAFT, APPROVED, SERVING, RETIRED = "draft", "approved", "serving", "retired"
OFFERED = (APPROVED, SERVING)
_OPEN = ("placed", "admitted", "live", "lost")

# An engine of a version that is warm: reported ready, its attempt current and live.
_WARM = exists().where(and_(
    engines.c.version == versions.c.digest, attempts.c.run == engines.c.run, attempts.c.attempt == engines.c.attempt,
    attempts.c.state == "live", runs.c.id == engines.c.run, runs.c.attempt == engines.c.attempt,
))


def model(connection: Connection, name: str) -> Row[Any] | None:
    """Return the model of that name, or None."""
    return connection.execute(select(models).where(models.c.name == name)).one_or_none()


def every_model(connection: Connection) -> list[Row[Any]]:
    """Return all models by name, each with its owner's name."""
    wanted = select(models, people.c.name.label("owner_name")).join(people, people.c.id == models.c.owner)
    return list(connection.execute(wanted.order_by(models.c.name)))


def add_model(connection: Connection, name: str, *, tenant: str, owner: str, tier: str, now_us: int) -> None:
    """Insert a model; IntegrityError when the name is taken."""
    connection.execute(insert(models).values(name=name, tenant=tenant, owner=owner, tier=tier, created_us=now_us))


def _versions() -> Any:
    """Select versions with their model's tenant, tier and owner, and whether an engine is warm."""
    return select(
        versions, models.c.tenant, models.c.tier.label("model_tier"), models.c.owner.label("model_owner"),
        _WARM.label("warm"),
    ).join(models, models.c.name == versions.c.model)


def version(connection: Connection, digest: str) -> Row[Any] | None:
    """Return the version of that manifest digest, or None."""
    return connection.execute(_versions().where(versions.c.digest == digest)).one_or_none()


def versions_in(connection: Connection, digests: Iterable[str]) -> dict[str, Row[Any]]:
    """Return digest → version for those of `digests` that are registered."""
    found = connection.execute(_versions().where(versions.c.digest.in_(list(digests))))
    return {str(row.digest): row for row in found}


def versions_of(connection: Connection, name: str) -> list[Row[Any]]:
    """Return the versions of a model, newest first."""
    return list(connection.execute(_versions().where(versions.c.model == name).order_by(versions.c.number.desc())))


def add_version(
    connection: Connection, digest: str, name: str, *, tier: str, run: str, step: int, lineage: dict[str, Any],
    created_by: str, now_us: int,
) -> int:
    """Insert a draft under the model's next number and return that; IntegrityError for a digest that is there."""
    highest = connection.execute(select(func.max(versions.c.number)).where(versions.c.model == name)).scalar_one()
    number = int(highest or 0) + 1
    connection.execute(insert(versions).values(
        digest=digest, model=name, number=number, tier=tier, state=DRAFT, run=run, step=step,
        lineage=json.dumps(lineage), request="", created_by=created_by, created_us=now_us, moved_us=now_us))
    return number


def move(connection: Connection, digest: str, now_us: int, *, frm: Collection[str], to: str) -> bool:
    """Move a version that is in one of the states `frm`; False when it is in none of them."""
    same = (versions.c.digest == digest) & versions.c.state.in_(list(frm))
    return connection.execute(update(versions).where(same).values(state=to, moved_us=now_us)).rowcount == 1


def set_request(connection: Connection, digest: str, request: str) -> None:
    """Note which approval request a version is bound to."""
    connection.execute(update(versions).where(versions.c.digest == digest).values(request=request))


def provider_of(connection: Connection, run: str) -> str:
    """Return the name of the provider that wrapped the run's key, empty when the run has none."""
    found = connection.execute(select(run_keys.c.provider).where(run_keys.c.run == run)).scalar_one_or_none()
    return str(found or "")


def add_engine(connection: Connection, run: str, attempt: int, digest: str, now_us: int) -> bool:
    """Note that this attempt's engine is warm; False when that was known."""
    same = (engines.c.run == run) & (engines.c.attempt == attempt)
    if connection.execute(select(engines.c.run).where(same)).first() is not None:
        return False
    connection.execute(insert(engines).values(run=run, attempt=attempt, version=digest, ready_us=now_us))
    return True


def engines_of(connection: Connection, digest: str) -> list[tuple[Row[Any], int]]:
    """Return (run, time at which its present attempt was warm or 0) of every open engine run of a version."""
    found = []
    for row in connection.execute(
        select(runs).where(runs.c.state.in_(_OPEN), runs.c.plan.contains(digest, autoescape=True))
        .order_by(runs.c.created_us)
    ):
        plan = json.loads(row.plan)
        if plan.get("serve") and plan.get("weights") == [digest]:
            same = (engines.c.run == row.id) & (engines.c.attempt == row.attempt)
            warm = connection.execute(select(engines.c.ready_us).where(same)).scalar_one_or_none()
            found.append((row, int(warm or 0)))
    return found


def made_by_run(connection: Connection, run: str) -> list[str]:
    """Return the names of the models that have a version which `run` made."""
    return list(connection.execute(select(versions.c.model).where(versions.c.run == run).distinct()).scalars())


def makers(connection: Connection) -> list[tuple[Row[Any], Row[Any]]]:
    """Return (open run, version) of every version whose run still holds its weights."""
    found = list(connection.execute(_versions().join(runs, runs.c.id == versions.c.run).where(runs.c.state.in_(_OPEN))))
    kept = {r.id: r for r in connection.execute(select(runs).where(runs.c.id.in_([v.run for v in found])))}
    return [(kept[v.run], v) for v in found]


def out_of_step(connection: Connection) -> list[tuple[Row[Any], str]]:
    """Return (version, the state it should have) where the column does not say whether an engine is warm."""
    cold = _versions().where(versions.c.state == SERVING, ~_WARM)
    warm = _versions().where(versions.c.state == APPROVED, _WARM)
    return [(r, APPROVED) for r in connection.execute(cold)] + [(r, SERVING) for r in connection.execute(warm)]


def offered(connection: Connection) -> list[Row[Any]]:
    """Return one version a model: the newest with a warm engine, else the newest approved one."""
    best: dict[str, Row[Any]] = {}
    for row in connection.execute(_versions().where(versions.c.state.in_(OFFERED))):
        old = best.get(row.model)
        if old is None or (row.warm, row.number) > (old.warm, old.number):
            best[row.model] = row
    return [best[name] for name in sorted(best)]


def state_of(row: Row[Any]) -> str:
    """Return the state of a version as of this transaction: serving exactly while an engine of it is warm."""
    if row.state in OFFERED:
        return SERVING if row.warm else APPROVED
    return str(row.state)
