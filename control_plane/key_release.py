"""Give the keys of an attempt to the node that runs it. Decision 0004 §1; formats in docs/formats/key-hierarchy.md.

Rules:
1. All conditions are read from our own store, three times: before the gate is asked, right before a key is
   unwrapped, and in the transaction that keeps the record. A stop that comes in between voids the permit;
   the question is asked once more and then refused.
2. A run gets its own run key. Of a version that it loads it gets the file keys that the version's verified manifest
   lists, never the run key of the run that made it.
3. A stopped run or model gives its key to nobody: neither to itself, nor to an engine, nor to a child.
4. No record, no key. Each release is one; a refusal is one too, the same at most once a minute, since a node asks
   again and again.
"""

import base64
import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.auth.site import state
from control_plane.desk import refuse_if_stopped
from control_plane.lifecycle import own_attempt
from control_plane.parts import Parts
from control_plane.standing import Standing
from control_plane.store import checkpoints, people, registry, run_keys, runs
from control_plane.store.db import reading, writing
from control_plane.store.run_keys import Registered
from interlock import manifest
from interlock.call import Action, Call, Resource, Subject
from interlock.errors import Conflict, Denied, Halted, NotFound, Refusal, Untrusted
from interlock.event import Event, EventType
from interlock.order import Labels, LaunchOrder, Plan
from interlock.permit import Permit
from interlock.signed import Signed
from interlock.tier import Tier, at_least
from kms.envelope import RunKey, file_keys
from kms.provider import LOCAL
from kms.release import no_lease, release
from policy.facts import Facts


@dataclass(frozen=True)
class Due:
    """What an attempt may have now: its own key (None without checkpoints), and each version with its run's key."""

    run: Row[Any]
    labels: Labels
    plan: Plan
    own: RunKey | None
    versions: tuple[tuple[Registered, RunKey], ...]


def keys_for(parts: Parts, node: str, run: str, attempt: int) -> dict[str, Any]:
    """Return ``{run_key, files, newest}`` of the attempt for `node`; raises the typed refusal, which is on record.

    Raises NotFound, Denied, Conflict, Halted, Stale, Unavailable, Untrusted or NotRecorded.
    """
    try:
        return _again(parts, node, run, attempt)
    except Refusal as refusal:
        parts.desk.note_rarely(f"key {node} {run} {attempt} {refusal.code}", Event(
            EventType.RUN_KEY_REFUSED, f"node/{node}", run=run[:64],
            facts={"attempt": attempt, "node": node, "code": refusal.code}))
        raise


def _again(parts: Parts, node: str, run: str, attempt: int) -> dict[str, Any]:
    """Ask a second time when only the permit was at fault: an order about something else moved the stop epoch, or a
    slow token outlived it. A node takes such a refusal for a final one."""
    try:
        return _released(parts, node, run, attempt)
    except (Halted, Untrusted) as refusal:
        if refusal.code not in ("stopped.epoch", "untrusted.permit"):
            raise
        return _released(parts, node, run, attempt)


def _released(parts: Parts, node: str, run: str, attempt: int) -> dict[str, Any]:
    with reading(parts.engine) as connection:
        due = _due(parts, connection, node, run, attempt)
        facts = Facts(roles=people.roles_of(connection, due.run.owner, due.run.tenant), bundle_age_ms=0,
                      state=state(connection), own=True)
        known = None if due.own is None else checkpoints.newest(connection, run)
    permit = parts.gate.ask(_call(due), facts)

    def live() -> bool:
        with reading(parts.engine) as connection:
            _due(parts, connection, node, run, attempt)
        return True

    def opened(kept: RunKey) -> bytes:
        provider = parts.keys.named(kept.wrapped.provider)
        return release(permit, run, kept, provider, epoch=parts.desk.epoch(), lease_live=live)

    own = None if due.own is None else _text(opened(due.own))
    files = {version.digest: _files(version, opened(kept)) for version, kept in due.versions}
    _record(parts, node, due, permit, attempt)
    return {"run_key": own, "files": files, "newest": None if known is None else [known.step, known.attempt]}


def _call(due: Due) -> Call:
    row = due.run
    who = Subject(row.subject, row.tenant, "person" if row.subject == row.owner else "service", row.owner)
    return Call(Action.RELEASE_KEY, who, Resource("run", row.id, row.tenant, Tier(row.tier)), row.id, row.plan_digest)


def _files(version: Registered, run_key: bytes) -> dict[str, str]:
    """Return file → key for the files of a version whose manifest verifies and is the registered one."""
    found = manifest.verify(version.manifest, run_key)
    if (found.digest(), found.run, found.step) != (version.digest, version.run, version.step):
        raise Untrusted("the manifest is not that of the registered version", code="manifest",
                        next_step="register the checkpoint again")
    return {name: _text(key) for name, key in file_keys(run_key, found).items()}


def _record(parts: Parts, node: str, due: Due, permit: Permit, attempt: int) -> None:
    """Make the release durable, in a transaction in which everything still holds."""
    row = due.run
    with writing(parts.engine) as connection:
        _due(parts, connection, node, row.id, attempt)
        permit.check(Action.RELEASE_KEY, f"run/{row.id}", epoch=parts.desk.granting(connection).epoch)
        parts.ledger.record(Event(EventType.RUN_KEY_RELEASED, row.subject, row.tenant, row.id, facts={
            "attempt": attempt, "node": node, "record": permit.record,
            "purpose": "serve" if due.plan.serve else "train", "own": due.own is not None,
            "versions": [version.digest for version, _ in due.versions],
            "providers": sorted({k.wrapped.provider for k in [due.own, *(k for _, k in due.versions)] if k})}),
            connection)


# --- what must hold ----------------------------------------------------------------------------------

def _due(parts: Parts, connection: Connection, node: str, run: str, attempt: int) -> Due:
    """Return what the attempt may have as of this transaction, or raise the refusal that says why not."""
    row, placed = runs.one(connection, run), own_attempt(connection, node, run, attempt)
    if row is None or row.attempt != placed.attempt:
        raise Conflict("the run has a newer attempt", code="attempt", next_step="that attempt gets the keys")
    if placed.state in runs.OVER or placed.outcome:
        raise Conflict("the attempt is over", code="over", next_step="start the run again")
    standing, labels = parts.desk.granting(connection), Labels.from_json(json.loads(placed.labels))
    refuse_if_stopped(standing, labels)
    if standing.permit_too_old(placed.epoch, labels):
        raise Halted("the run was stopped since it was granted", code="epoch", next_step="start the run again")
    if runs.disabled(connection, labels.owner):
        raise Denied("the owner of the run is disabled", code="owner", next_step="ask an administrator")
    order = LaunchOrder.from_json(Signed.from_json(json.loads(placed.launch)).body())
    if not parts.keys.lease_live(run, attempt, order.lease_ms):
        raise no_lease()
    plan = Plan.from_json(json.loads(row.plan))
    if not plan.checkpoints and not plan.weights:
        raise Denied("the plan has neither checkpoints nor weights, so there is no key", code="plan",
                     next_step="launch a plan that says so")
    own = _key(connection, run) if plan.checkpoints else None
    return Due(row, labels, plan, own, tuple(_version(connection, standing, row, plan, d) for d in plan.weights))


def _key(connection: Connection, run: str) -> RunKey:
    kept = run_keys.one(connection, run)
    if kept is None:
        raise NotFound("that run has no run key", code="run_key", next_step="launch the plan again")
    return kept


def _version(
    connection: Connection, standing: Standing, row: Row[Any], plan: Plan, digest: str
) -> tuple[Registered, RunKey]:
    """Return a version that the run may load, with the key of the run that made it."""
    found = run_keys.registered(connection, digest)
    if found is None or found.tenant != row.tenant:
        raise NotFound("no such version is registered", code="version", next_step="interlock model list")
    refuse_if_stopped(standing, found.labels)
    if found.state == registry.RETIRED or (plan.serve and found.state not in registry.OFFERED):
        raise Conflict(f"the version is {found.state}", code="version_state",
                       next_step="interlock model submit, and have it approved")
    if not at_least(plan.tier, found.tier):
        raise Denied(f"a run of tier {plan.tier.value} gets no weights of tier {found.tier.value}", code="tier",
                     next_step=f"launch at tier {found.tier.value}")
    kept = _key(connection, found.run)
    if found.tier is Tier.CRITICAL and kept.wrapped.provider == LOCAL:
        raise Denied("a critical version is not sealed under a key file", code="provider",
                     next_step="train at tier critical, with kms.pkcs11 set up")
    return found, kept


def _text(key: bytes) -> str:
    return base64.b64encode(key).decode()
