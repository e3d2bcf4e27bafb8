"""Rules of the registry: what a version is made of, who approves it, when it may be served, when it is over.

1. A version is the digest of a committed manifest of kind `weights`. Its tier is at least that of its model, its run
   and its parents; nobody can ask for less.
2. Tier critical needs a run key that no local provider wrapped; tier high too, unless the settings allow it.
3. draft → approved by an approval request bound to exactly what is registered; the effect asks everything again.
4. A plan that names versions is asked for them in the transaction that places each attempt, so that a version that
   was retired a moment before, or an engine's whose officer has left since, is in no new attempt.
5. A version is serving exactly while a live attempt reported a warm engine of it. The column follows; pages,
   snapshot and answers read the attempts themselves.
"""

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row
from sqlalchemy.exc import IntegrityError

from control_plane.auth import approvals
from control_plane.parts import Parts
from control_plane.store import approvals as requests
from control_plane.store import checkpoints, registry, runs
from control_plane.store.db import now_us, writing
from interlock.call import Resource
from interlock.canon import digest
from interlock.errors import ApprovalRequired, Conflict, Denied, NotFound
from interlock.event import Event, EventType
from interlock.order import Plan
from interlock.tier import PROFILES, Tier, at_least, highest
from kms.provider import LOCAL

WEIGHTS = "weights"
MAX_ANCESTORS = 256  # eight parents with as many stay readable in a snapshot; see also issuer.py, rule 5
MAX_DIGESTS = 1000


@dataclass(frozen=True)
class Draft:
    """What would be registered: all of it from the store, nothing but name and tier from the caller."""

    version: str
    model: str
    tenant: str
    tier: Tier
    run: str
    step: int
    lineage: dict[str, Any]
    new_model: bool

    @property
    def ancestors(self) -> tuple[str, ...]:
        """Return the names of the ancestor models."""
        return tuple(self.lineage["models"])


# --- plans that name versions -----------------------------------------------------------------------
def lineage_of(connection: Connection, plan: Plan) -> tuple[str, ...]:
    """Return the names of the models whose versions `plan` loads, and of their ancestors: a stop of one covers it."""
    return _ancestors(registry.versions_in(connection, plan.weights).values())


def labelled(connection: Connection, plan: Plan, run: str) -> tuple[str, ...]:
    """Return the lineage of an attempt of `run`: what it loads, and the models that it has made a version of."""
    made = set(registry.made_by_run(connection, run)) - {plan.model}
    return tuple(sorted({*lineage_of(connection, plan), *made}))


def _ancestors(parents: Any) -> tuple[str, ...]:
    found: set[str] = set()
    for row in parents:
        found |= {str(row.model), *json.loads(row.lineage)["models"]}
    return tuple(sorted(found))


def loaded(connection: Connection, plan: Plan) -> list[Row[Any]]:
    """Return those versions of the plan's tenant that `plan` names."""
    known = registry.versions_in(connection, plan.weights)
    return [known[v] for v in plan.weights if v in known and known[v].tenant == plan.tenant]


def require_weights(connection: Connection, plan: Plan, owner: str) -> None:
    """Refuse a plan that loads what it may not.

    Args: `owner` of the run, whose own approval of what he serves does not count.
    Raises NotFound (``not_found.version``: unknown, or another tenant's), Conflict (``conflict.version_state``:
    retired; of an engine: not approved), ApprovalRequired (of an engine: an approver left), Denied (``denied.tier``:
    the plan is below a version; ``denied.serve``: the plan of an engine says something else than its version).
    """
    known = {row.digest: row for row in loaded(connection, plan)}
    for wanted in plan.weights:
        row = known.get(wanted)
        if row is None:
            raise NotFound("no such version, or it is not yours", code="version", next_step="interlock model list",
                           details={"version": wanted})
        if not at_least(plan.tier, Tier(row.tier)):
            raise Denied(f"{row.model}@{row.number} is of tier {row.tier}; nothing that loads it is below that",
                         code="tier", next_step=f"launch with --tier {row.tier}")
        if row.state == registry.RETIRED or (plan.serve and row.state not in registry.OFFERED):
            raise refuse_state(row)
        if plan.serve and (row.model != plan.model or row.tier != plan.tier.value):
            raise Denied("an engine serves a version under its own model and tier", code="serve",
                         next_step="interlock model serve NAME")
        if plan.serve:
            require_approved(connection, row, owner)


def resource_of(row: Row[Any]) -> Resource:
    """Return the model of a version as a resource, with the version's tier and the names of its ancestors."""
    return Resource("model", row.model, row.tenant, Tier(row.tier), tuple(json.loads(row.lineage)["models"]))


def refuse_state(row: Row[Any]) -> Conflict:
    """Return the refusal of something that this version's state does not allow."""
    state = registry.state_of(row)
    steps = {registry.DRAFT: f"interlock model submit {row.model}@{row.number}"}
    return Conflict(f"{row.model}@{row.number} is {state}", code="version_state",
                    next_step=steps.get(state, f"interlock model show {row.model}"),
                    details={"version": row.digest, "state": state})


# --- registering ------------------------------------------------------------------------------------
def found(connection: Connection, version: str) -> Row[Any]:
    """Return the version of that digest; raises NotFound (``not_found.version``)."""
    row = registry.version(connection, version)
    if row is None:
        raise NotFound("no such version, or it is not yours", code="version", next_step="interlock model list")
    return row


def draft(
    parts: Parts, connection: Connection, name: str, run: Row[Any], step: int | None, asked: Tier | None
) -> Draft:
    """Return what registering a checkpoint of `run` as `name` would make.

    Args: `step` of the checkpoint, None for the newest of kind weights; `asked` the tier that the caller wants, None
    for the lowest possible. Raises NotFound (``not_found.checkpoint``), Conflict (the digest is registered, the name
    is another tenant's) or Denied (``denied.tier``, ``denied.provider``).
    """
    kept = _checkpoint(connection, run.id, step)
    old = registry.version(connection, kept.digest)
    if old is not None:
        raise Conflict(f"these weights are registered as {old.model}@{old.number}", code="version",
                       next_step=f"interlock model show {old.model}",
                       details={"version": old.digest, "model": old.model, "number": old.number})
    model = registry.model(connection, name)
    if model is not None and model.tenant != run.tenant:
        raise Conflict("this name is taken", code="model_name", next_step="choose another name")
    plan = Plan.from_json(json.loads(run.plan))
    lineage = {**_lineage(connection, plan, name), "dataset_digests": _dataset_digests(parts, run.id)}
    tier = _tier(connection, run, plan, model, asked)
    require_provider(parts, connection, run.id, tier)
    return Draft(kept.digest, name, run.tenant, tier, run.id, int(kept.step), lineage, model is None)


def _checkpoint(connection: Connection, run: str, step: int | None) -> Row[Any]:
    rows = [c for c in checkpoints.of_run(connection, run) if c.kind == WEIGHTS and step in (None, c.step)]
    if not rows:
        raise NotFound("the node has reported no such checkpoint with weights", code="checkpoint",
                       next_step="save with assets=… makes one; wait for its node, then see interlock files and logs")
    return max(rows, key=lambda c: (c.step, c.attempt, c.committed_us))


def _lineage(connection: Connection, plan: Plan, name: str) -> dict[str, Any]:
    """Return where the weights come from. The model that the run was launched for counts as an ancestor too: a stop
    of it covers what it made, under whatever name."""
    models = {*lineage_of(connection, plan), plan.model} - {name, ""}
    if len(models) > MAX_ANCESTORS:
        raise Conflict(f"these weights descend from more than {MAX_ANCESTORS} models", code="lineage",
                       next_step="start from a version with fewer ancestors")
    return {
        "parents": list(plan.weights), "models": sorted(models),
        "datasets": [d.path for d in plan.datasets], "code": [{"name": n, "digest": d} for n, d in plan.code],
    }


def _dataset_digests(parts: Parts, run: str) -> dict[str, str]:
    """Return path → digest of what the run was shown, as its nodes told; the latest attempt's where they differ."""
    rows = parts.ledger.newest(limit=MAX_DIGESTS, run=run, type=EventType.DATA_DIGESTED.value)
    told = [row.event.get("facts", {}) for row in rows if row.node != "control"]
    return {str(f["path"]): str(f["digest"]) for f in told if f.get("path") and f.get("digest")}


def _tier(
    connection: Connection, run: Row[Any], plan: Plan, model: Row[Any] | None, asked: Tier | None
) -> Tier:
    parents = [Tier(row.tier) for row in registry.versions_in(connection, plan.weights).values()]
    floor = highest(Tier(run.tier), *parents, *([Tier(model.tier)] if model is not None else []))
    if asked is not None and not at_least(asked, floor):
        raise Denied(f"model, run and parents of this version are of tier {floor.value}; it is not below that",
                     code="tier", next_step=f"register it with --tier {floor.value}, or leave --tier out")
    return floor if asked is None else asked


def require_provider(parts: Parts, connection: Connection, run: str, tier: Tier) -> None:
    """Refuse a tier whose weights no fitting provider protects. Raises Denied (``denied.provider``)."""
    provider = registry.provider_of(connection, run)
    if not provider:
        raise Denied("this run has no key, so nobody could ever open its weights", code="provider",
                     next_step="train with checkpoints: interlock train")
    if provider == LOCAL and tier not in parts.settings.kms.local_tiers():
        raise Denied(f"the key of this run is wrapped by a local provider; tier {tier.value} needs another",
                     code="provider", next_step=f"train it again with --tier {tier.value}")


def register(parts: Parts, connection: Connection, wanted: Draft, by: str, tenant: str) -> int:
    """Keep the draft and return its number. Call it in the transaction in which `draft` gave `wanted`.

    Raises Conflict when another call registered the same at the same time.
    """
    now = now_us()
    try:
        if wanted.new_model:
            registry.add_model(connection, wanted.model, tenant=wanted.tenant, owner=by, tier=wanted.tier.value,
                               now_us=now)
            parts.ledger.record(Event(EventType.MODEL_REGISTERED, by, tenant, facts={
                "model": wanted.model, "tier": wanted.tier.value}), connection)
        number = registry.add_version(
            connection, wanted.version, wanted.model, tier=wanted.tier.value, run=wanted.run, step=wanted.step,
            lineage=wanted.lineage, created_by=by, now_us=now)
    except IntegrityError:
        raise Conflict("another call registered this at the same time", code="version",
                       next_step=f"interlock model show {wanted.model}") from None
    parts.ledger.record(Event(EventType.VERSION_REGISTERED, by, tenant, wanted.run, facts={
        "version": wanted.version, "model": wanted.model, "number": number, "tier": wanted.tier.value,
        "step": wanted.step, "lineage": wanted.lineage}), connection)
    return number


# --- approving --------------------------------------------------------------------------------------
def body_of(row: Row[Any]) -> dict[str, Any]:
    """Return what the approval of a version is bound to."""
    return {
        "version": row.digest, "model": row.model, "number": row.number, "tier": row.tier, "run": row.run,
        "step": row.step, "lineage": json.loads(row.lineage),
    }


def needed_for(tier: Tier) -> int:
    """Return how many officers approve a version of that tier."""
    return max(approvals.FLOOR[approvals.VERSION], PROFILES[tier].launch_approvals)


def approvers(connection: Connection, row: Row[Any]) -> tuple[str, ...]:
    """Return the persons whose approval of exactly this version counts now."""
    request = requests.one(connection, row.request) if row.request else None
    if request is None or (request.kind, request.state) != (approvals.VERSION, requests.USED):
        return ()
    if request.digest != digest(body_of(row)):
        return ()
    return approvals.standing(connection, request).approvers


def submit(parts: Parts, connection: Connection, row: Row[Any], by: str, tenant: str) -> requests.Request:
    """Return the open approval request for a version, made by this call when there is none.

    A draft is submitted, and a version whose approvers have left since. Raises Conflict (``conflict.version_state``).
    """
    short = len(approvers(connection, row)) < needed_for(Tier(row.tier))
    if row.state != registry.DRAFT and not (row.state in registry.OFFERED and short):
        raise refuse_state(row)
    body, old = body_of(row), requests.one(connection, row.request) if row.request else None
    if old is not None and old.state == requests.OPEN and old.digest == digest(body) and old.expires_us > now_us():
        return old
    run = runs.one(connection, row.run)
    made = approvals.ask(
        connection, kind=approvals.VERSION, body=body, tenant=row.tenant, asked_by=by,
        owner=str(run.owner) if run is not None else row.created_by, needed=needed_for(Tier(row.tier)))
    if row.state == registry.DRAFT:
        registry.set_request(connection, row.digest, made.id)
    parts.ledger.record(Event(EventType.APPROVAL_ASKED, by, tenant, row.run, facts={
        "request": made.id, "kind": made.kind, "digest": made.digest, "tier": row.tier, "needed": made.needed,
        "version": row.digest, "model": row.model, "number": row.number}), connection)
    return made


def settle(parts: Parts, now: approvals.Standing) -> dict[str, Any]:
    """Approve the version of a request that has all its votes, after asking everything again in one transaction.

    Raises NotFound, Conflict (moved, changed, closed), Denied (provider) or ApprovalRequired.
    """
    with writing(parts.engine) as connection:
        row = found(connection, str(now.request.body.get("version", "")))
        if row.state == registry.RETIRED:
            raise refuse_state(row)
        require_provider(parts, connection, row.run, Tier(row.tier))
        used = approvals.use(connection, now.request.id, kind=approvals.VERSION, bound=digest(body_of(row)))
        if used.given < needed_for(Tier(row.tier)):
            raise approvals.missing(used)
        registry.set_request(connection, row.digest, now.request.id)
        if row.state == registry.DRAFT:
            moved(parts, connection, row, registry.APPROVED, "control", request=now.request.id,
                  approvers=list(used.approvers))
    parts.bell.ring()
    return {"version": row.digest, "model": row.model, "number": row.number, "state": registry.APPROVED}


def moved(parts: Parts, connection: Connection, row: Row[Any], to: str, by: str, **facts: Any) -> None:
    """Move a version and record it; raises Conflict when it is no longer in the state that was read."""
    if not registry.move(connection, row.digest, now_us(), frm=(row.state,), to=to):
        raise Conflict(f"{row.model}@{row.number} moved meanwhile", code="version_state",
                       next_step=f"interlock model show {row.model}")
    parts.ledger.record(Event(EventType.VERSION_MOVED, by, row.tenant, row.run, facts={
        "version": row.digest, "model": row.model, "number": row.number, "from": row.state, "to": to, **facts}),
        connection)


def require_approved(connection: Connection, row: Row[Any], but: str) -> tuple[str, ...]:
    """Return the persons other than `but` whose approval lets this version be served now.

    Raises Conflict (``conflict.version_state``) or ApprovalRequired (an approver left, or is `but` himself).
    """
    if row.state not in registry.OFFERED:
        raise refuse_state(row)
    every, needed = approvers(connection, row), needed_for(Tier(row.tier))
    persons = tuple(p for p in every if p != but)
    if len(persons) < needed:
        step = f"interlock model submit {row.model}@{row.number}"
        raise ApprovalRequired(
            f"{needed - len(persons)} more person(s) must approve {row.model}@{row.number}: an earlier approval counts "
            "no more, or is your own", next_step=step if len(every) < needed else "let somebody else serve it",
            details={"needed": needed, "given": len(persons)})
    return persons
