"""Queries about run keys, and about the versions whose file keys a run may get."""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, insert, select, update

from control_plane.store.tables import attempts, checkpoints, models, run_keys, runs, versions
from interlock.order import Labels
from interlock.tier import Tier
from kms.envelope import RunKey
from kms.provider import Context, Wrapped


def add(connection: Connection, kept: RunKey, now_us: int) -> None:
    """Keep the run key of a run whose row is there. A run has one: a second is an IntegrityError."""
    wrapped = kept.wrapped
    connection.execute(insert(run_keys).values(
        run=kept.context.run, provider=wrapped.provider, kek=wrapped.kek, kek_version=wrapped.version,
        wrapped=wrapped.data, context=json.dumps(kept.context.as_json()), made_us=now_us))


def one(connection: Connection, run: str) -> RunKey | None:
    """Return the run key of `run`, or None. Its context is made of the run's own row: a wrapped key that was put
    under another run does not open."""
    row = connection.execute(
        select(run_keys, runs.c.tenant, runs.c.model, runs.c.tier).join(runs, runs.c.id == run_keys.c.run)
        .where(run_keys.c.run == run)).one_or_none()
    if row is None:
        return None
    return RunKey(Wrapped(row.provider, row.kek, int(row.kek_version), bytes(row.wrapped)),
                  Context(row.tenant, row.model, row.run, Tier(row.tier)))


def providers(connection: Connection) -> frozenset[str]:
    """Return the providers that have wrapped a key which is kept."""
    return frozenset(connection.execute(select(run_keys.c.provider).distinct()).scalars())


def of_version(connection: Connection, provider: str, kek_version: int) -> list[str]:
    """Return the runs whose key that version of a KEK still wraps: what keeps the minimum down."""
    same = (run_keys.c.provider == provider) & (run_keys.c.kek_version == kek_version)
    return [str(r.run) for r in connection.execute(select(run_keys.c.run).where(same).order_by(run_keys.c.run))]


def replace(connection: Connection, run: str, old: Wrapped, new: Wrapped) -> bool:
    """Put a rewrapped key in place of exactly `old`; return whether it was still there."""
    same = (run_keys.c.run == run) & (run_keys.c.wrapped == old.data)
    return connection.execute(update(run_keys).where(same).values(
        provider=new.provider, kek=new.kek, kek_version=new.version, wrapped=new.data)).rowcount == 1


@dataclass(frozen=True)
class Registered:
    """A registered version, as far as its keys are concerned. `labels` are those of the attempt that saved it, with
    the model and all its ancestors, so that a stop of any of them covers it."""

    digest: str
    model: str
    tenant: str
    tier: Tier
    state: str
    run: str
    step: int
    manifest: bytes
    labels: Labels


def registered(connection: Connection, digest: str) -> Registered | None:
    """Return the registered version of that digest, or None."""
    row = connection.execute(
        select(versions, models.c.tenant, checkpoints.c.manifest, attempts.c.labels)
        .join(models, models.c.name == versions.c.model)
        .join(checkpoints, checkpoints.c.digest == versions.c.digest)
        .join(attempts, (attempts.c.run == checkpoints.c.run) & (attempts.c.attempt == checkpoints.c.attempt))
        .where((versions.c.digest == digest) & (checkpoints.c.run == versions.c.run))).one_or_none()
    return None if row is None else Registered(
        row.digest, row.model, row.tenant, Tier(row.tier), row.state, row.run, int(row.step), bytes(row.manifest),
        _covered(row))


def _covered(row: Row[Any]) -> Labels:
    made, lineage = Labels.from_json(json.loads(row.labels)), json.loads(row.lineage)
    ancestors = {made.model, *made.lineage, *lineage.get("models", []), *lineage.get("parents", [])} - {"", row.model}
    return Labels(made.tenant, made.subject, made.owner, made.run, made.node, made.tier, row.model,
                  tuple(sorted(ancestors)))
