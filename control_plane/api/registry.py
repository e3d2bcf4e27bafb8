"""Models and their versions: register, look, submit for approval, serve, retire (decision 0004 §5)."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints
from sqlalchemy import Connection, Row

from control_plane import engines
from control_plane import registry as rules
from control_plane.api import looking, runs
from control_plane.api.context import Body, Caller, SignedIn, declare, pass_gate
from control_plane.auth import approvals
from control_plane.engine_plan import engine_plan
from control_plane.parts import Parts, parts_of
from control_plane.store import approvals as requests
from control_plane.store import checkpoints, registry
from control_plane.store import runs as run_rows
from control_plane.store.db import reading, writing
from interlock.call import Action, Resource
from interlock.errors import ApprovalRequired, Conflict, Denied, NotFound
from interlock.event import Event, EventType
from interlock.tier import Tier, tier_of

router = APIRouter()

declare({
    ("GET", "/api/models"): Action.LOOK,
    ("GET", "/api/models/{name}"): Action.LOOK,
    ("POST", "/api/models/{name}/versions"): Action.REGISTER,
    ("POST", "/api/versions/{digest}/submit"): Action.REGISTER,
    ("POST", "/api/versions/{digest}/serve"): Action.SERVE,
    ("POST", "/api/versions/{digest}/retire"): Action.REGISTER,
})

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
Id = Annotated[str, StringConstraints(max_length=64)]


class VersionBody(Body):
    """`step` of the checkpoint (default: the newest with weights); `tier` at least that of model, run and parents."""

    run: Id
    step: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = None
    tier: Annotated[str, StringConstraints(max_length=16)] | None = None


class ServeBody(Body):
    """`step_up` is a proof of the second factor for `serve`, bound to the digest of the engine's plan."""

    step_up: Id | None = None


@contextmanager
def _noted(parts: Parts, caller: Caller, run: str, **about: str) -> Iterator[None]:
    """Leave a record of a refusal by the registry's own rules, the same at most once a minute; the gate records its
    own."""
    try:
        yield
    except (Denied, ApprovalRequired) as refusal:
        parts.desk.note_rarely(f"registry {caller.id} {run} {refusal.code} {sorted(about.items())}", Event(
            EventType.REGISTRY_REFUSED, caller.id, caller.tenant, run, facts={"code": refusal.code, **about}))
        raise


@router.post("/api/models/{name}/versions", status_code=201)
def register(request: Request, caller: SignedIn, name: Name, body: VersionBody) -> dict[str, Any]:
    """Register a checkpoint of a run as the next version of a model; the model is made when it is new."""
    parts, asked = parts_of(request), None if body.tier is None else tier_of(body.tier)
    with reading(parts.engine) as connection:
        run = run_rows.one(connection, body.run)
    if run is None:
        raise looking.unseen("run")
    looking.require(request, caller, Resource("run", run.id, run.tenant, Tier(run.tier)),
                    own=run.owner == caller.person)
    with _noted(parts, caller, run.id, act="register", model=name), reading(parts.engine) as connection:
        wanted = rules.draft(parts, connection, name, run, body.step, asked)
    about = Resource("model", name, run.tenant, wanted.tier, wanted.ancestors)
    pass_gate(request, caller, Action.REGISTER, about, bound=wanted.version, run=run.id)
    with writing(parts.engine) as connection:
        if rules.draft(parts, connection, name, run, body.step, asked) != wanted:
            raise Conflict("another call changed this model meanwhile", code="version", next_step="register again")
        number = rules.register(parts, connection, wanted, caller.person, caller.tenant)
    return {"version": wanted.version, "model": name, "number": number, "tier": wanted.tier.value,
            "state": registry.DRAFT}


@router.get("/api/models")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List the models of one's tenant, and of others what one may look at."""
    return {"models": visible(request, caller)}


@router.get("/api/models/{name}")
def one(request: Request, caller: SignedIn, name: Name) -> dict[str, Any]:
    """Show one model with its versions, their lineage and their engines. Never a key, never a manifest."""
    with reading(parts_of(request).engine) as connection:
        row = registry.model(connection, name)
    if row is None:
        raise looking.unseen("model")
    looking.require(request, caller, Resource("model", name, row.tenant, Tier(row.tier)),
                    own=row.tenant == caller.tenant)
    return _told(caller, next(m for m in _shown(parts_of(request)) if m["name"] == name))


def visible(request: Request, caller: Caller) -> list[dict[str, Any]]:
    """Return the models that the caller may see, each with its versions; for the console too."""
    looking.may(request, caller, Resource("model", "own", caller.tenant), own=True)
    found = _shown(parts_of(request))
    kinds = {(m["tenant"], m["tier"]) for m in found}
    seen = {(t, w) for t, w in kinds
            if looking.may(request, caller, Resource("model", "all", t, Tier(w)), own=t == caller.tenant)}
    return [_told(caller, m) for m in found if (m["tenant"], m["tier"]) in seen]


_NO_LINEAGE: dict[str, Any] = {"parents": [], "models": [], "datasets": [], "dataset_digests": {}, "code": []}


def _told(caller: Caller, model: dict[str, Any]) -> dict[str, Any]:
    """Return what this caller is told of a model. Who has no role (a partner) hears what he may call, not how it was
    made, by whom, and where it runs."""
    if caller.roles:
        return model
    hidden = {"run": "", "step": 0, "lineage": _NO_LINEAGE, "request": "", "created_by": "", "engines": []}
    return {**model, "owner": "", "owner_name": "", "versions": [
        {**v, **hidden} for v in model["versions"] if v["state"] in registry.OFFERED]}


def _shown(parts: Parts) -> list[dict[str, Any]]:
    with reading(parts.engine) as connection:
        return [{
            "name": m.name, "tenant": m.tenant, "owner": m.owner, "owner_name": m.owner_name, "tier": m.tier,
            "created_us": m.created_us,
            "versions": [_version(connection, v) for v in registry.versions_of(connection, m.name)],
        } for m in registry.every_model(connection)]


def _version(connection: Connection, row: Row[Any]) -> dict[str, Any]:
    kept = checkpoints.one(connection, row.digest)
    assert kept is not None
    return {
        "version": row.digest, "model": row.model, "number": row.number, "tier": row.tier,
        "state": registry.state_of(row), "run": row.run, "step": row.step, "lineage": json.loads(row.lineage),
        "request": row.request, "created_by": row.created_by, "created_us": row.created_us, "moved_us": row.moved_us,
        "items": kept.items, "bytes": kept.bytes,
        "engines": [{"run": run.id, "attempt": run.attempt, "node": run.node, "state": run.state,
                     "ready": bool(ready_us) and run.state == "live", "ready_us": ready_us}
                    for run, ready_us in registry.engines_of(connection, row.digest)],
    }


def _found(request: Request, caller: Caller, digest: str) -> Row[Any]:
    """Return the version when the caller may see its model; raises NotFound."""
    with reading(parts_of(request).engine) as connection:
        row = rules.found(connection, digest)
    if not looking.may(request, caller, Resource("model", row.model, row.tenant, Tier(row.model_tier)),
                       own=row.tenant == caller.tenant):
        raise NotFound("no such version, or it is not yours", code="version", next_step="interlock model list")
    return row


@router.post("/api/versions/{digest}/submit")
def submit(request: Request, caller: SignedIn, digest: Digest) -> dict[str, Any]:
    """Ask for the approval of a version. Asking changes nothing: officers approve exactly what is registered."""
    parts, row = parts_of(request), _found(request, caller, digest)
    caller.require_person()
    pass_gate(request, caller, Action.REGISTER, rules.resource_of(row), bound=digest, run=row.run)
    with writing(parts.engine) as connection:
        made = rules.submit(parts, connection, rules.found(connection, digest), caller.person, caller.tenant)
        now = approvals.standing(connection, made)
    answer = {"request": made.id, "needed": made.needed, "given": now.given, "digest": made.digest}
    if now.missing or made.state != requests.OPEN:
        return answer
    return {**answer, "effect": rules.settle(parts, now)}  # the votes were there, the effect had failed


@router.post("/api/versions/{digest}/serve", status_code=201)
def serve(request: Request, caller: SignedIn, digest: Digest, body: ServeBody | None = None) -> dict[str, Any]:
    """Start an engine of an approved version. The control plane makes the plan; nobody sends one."""
    row, step_up = _found(request, caller, digest), body.step_up if body else None
    plan = engine_plan(digest, row.model, Tier(row.tier), row.tenant)

    def wanted() -> runs.Wanted:
        parts = parts_of(request)
        with _noted(parts, caller, row.run, act="serve", version=digest), reading(parts.engine) as connection:
            persons = _approved(connection)

        def spend(connection: Connection) -> None:
            if _approved(connection) != persons:
                raise Conflict("the approvals of this version changed meanwhile", code="approval_changed",
                               next_step="serve it again")

        return runs.Wanted(plan, Action.SERVE, step_up, persons, row.request, spend)

    def _approved(connection: Connection) -> tuple[str, ...]:
        return rules.require_approved(connection, rules.found(connection, digest), caller.person)

    return {**runs.placed(request, caller, wanted), "version": digest, "model": row.model, "number": row.number}


@router.post("/api/versions/{digest}/retire")
def retire(request: Request, caller: SignedIn, digest: Digest) -> dict[str, Any]:
    """Retire a version for good; its engines are stopped."""
    row = _found(request, caller, digest)
    caller.require_person()
    pass_gate(request, caller, Action.REGISTER, rules.resource_of(row), bound=digest, run=row.run)
    stops = engines.retire(parts_of(request), digest, caller.person)
    return {"version": digest, "model": row.model, "number": row.number, "state": registry.RETIRED, "stops": stops}
