"""The node link's routes (0001-seams §4). The node is who its certificate says; a body never names it."""

import base64
import binascii
import json
import time
from typing import Annotated, Any

from cryptography import x509
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool

from control_plane import heartbeat, joining, lifecycle
from control_plane.api import node_checkpoints, node_keys, node_ready
from control_plane.api.context import Body, error_answer
from control_plane.issuer import GRANT_LIFE_US
from control_plane.lifecycle import Report, own_attempt
from control_plane.node_link import note_denied, peer
from control_plane.parts import Parts, parts_of
from control_plane.store import bundles, nodes, people, programmes, registry, runs, sessions
from control_plane.store.db import now_us, reading, writing
from interlock.canon import canonical
from interlock.errors import Denied, Malformed, NotFound, Refusal, Unavailable
from interlock.event import Event, EventType
from interlock.order import Plan
from interlock.signed import SNAPSHOT, sign

router = APIRouter(prefix="/node")
MAX_WAIT_S = 25
MAX_SNAPSHOT = 1 << 20  # what a node reads (interlock/canon.py)
Node = Annotated[str, Depends(peer)]
Wait = Annotated[int, Query(ge=0, le=60)]


class JoinBody(Body):
    """What a host that joins sends, without a client certificate."""

    secret: str
    csr: str
    supervisor_key: str


class CsrBody(Body):
    """A renewal: the node id stays that of the certificate."""

    csr: str


class OutputBody(Body):
    """A piece of output at its offset."""

    offset: int
    data: str


class FileBody(Body):
    """A result file."""

    name: str
    data: str
    digest: str


class SpoolBody(Body):
    """Records of one stream, in order."""

    stream: str
    records: list[dict[str, Any]]


class MarksBody(Body):
    """High-water marks, signed by the node key."""

    body: str
    sig: str


class FactsBody(Body):
    """What the host isolates and which tiers it may run."""

    layers: list[dict[str, Any]]
    profiles: list[dict[str, Any]]
    tiers: list[str]
    data_roots: list[str] = Field(default_factory=list)
    environments: list[str] = Field(default_factory=list)
    gateway: bool = False


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise Malformed("not base64", code="base64") from None


def on_refusal(request: Request, error: Exception) -> JSONResponse:
    """Answer a refusal, and record an incident when a node reached for what is another's."""
    assert isinstance(error, Refusal)
    node = getattr(request.state, "node", "")
    if node:
        note_denied(request, error, node)
    return error_answer(error)


def install(app: FastAPI) -> None:
    """Add the routes and their error handler."""
    app.include_router(router)
    app.include_router(node_ready.router)
    app.include_router(node_keys.router)
    app.include_router(node_checkpoints.router)
    app.add_exception_handler(Refusal, on_refusal)


@router.post("/join")
def join(request: Request, body: JoinBody) -> dict[str, Any]:
    """Join with a one-time secret; the only route without a client certificate."""
    return joining.join(parts_of(request), body.secret, body.csr, body.supervisor_key)


@router.post("/certificate")
def certificate(request: Request, node: Node, body: CsrBody) -> dict[str, str]:
    """Renew the certificate under the present one."""
    return {"certificate": parts_of(request).signers.authority.sign_node(body.csr, node)}


@router.post("/heartbeat")
def beat(request: Request, node: Node, body: dict[str, Any]) -> dict[str, Any]:
    """Answer a heartbeat of the supervisor."""
    return heartbeat.respond(parts_of(request), node, heartbeat.Heartbeat.from_json(body))


@router.get("/orders", dependencies=[Depends(peer)])
async def orders(request: Request, after: Annotated[int, Query(ge=0)] = 0, wait: Wait = 0) -> dict[str, Any]:
    """Return orders after `after`; holds the answer until there is one. Touches no database."""
    parts, until = parts_of(request), time.monotonic() + min(wait, MAX_WAIT_S)
    while True:
        rung = parts.bell.count
        found, last = parts.desk.feed(after)
        left = until - time.monotonic()
        if found or last < after or left <= 0:
            return {"orders": [{"n": n, "order": s.as_json()} for n, s in found], "last": last}
        await parts.bell.heard(rung, left)


@router.get("/work")
async def work(request: Request, node: Node, wait: Wait = 0) -> dict[str, Any]:
    """Return the launch orders that wait for this node; holds the answer until there is one."""
    parts, until = parts_of(request), time.monotonic() + min(wait, MAX_WAIT_S)
    await run_in_threadpool(_seen, parts, node)
    while True:
        rung = parts.bell.count
        found = await run_in_threadpool(_launches, parts, node)
        left = until - time.monotonic()
        if found or left <= 0:
            await run_in_threadpool(_seen, parts, node)
            return {"launches": found}
        await parts.bell.heard(rung, min(left, 5.0))


def _seen(parts: Parts, node: str) -> None:
    with writing(parts.engine) as connection:
        nodes.seen(connection, node, now_us())


def _launches(parts: Parts, node: str) -> list[Any]:
    with reading(parts.engine) as connection:
        return [json.loads(r.launch) for r in runs.waiting(connection, node, now_us() - GRANT_LIFE_US)]


@router.post("/runs/{run}/{attempt}/state")
def state(request: Request, node: Node, run: str, attempt: int, body: dict[str, Any]) -> dict[str, Any]:
    """Take a node's report about an attempt that is placed on it."""
    parts, report = parts_of(request), Report.from_json(body)
    with writing(parts.engine) as connection:
        moved = lifecycle.take(connection, node, run, attempt, report)
        nodes.seen(connection, node, now_us())
        if moved and report.state in _EVENTS:
            parts.ledger.record(Event(_EVENTS[report.state], f"node/{node}", run=run, facts={
                "attempt": attempt, "state": report.state, "outcome": report.outcome or {}, "node": node}), connection)
    parts.bell.ring()
    return {"state": report.state, "moved": moved}


_EVENTS = {"live": EventType.RUN_STARTED, "ended": EventType.RUN_ENDED, "stopped": EventType.RUN_ENDED,
           "refused": EventType.RUN_REFUSED}


@router.post("/runs/{run}/{attempt}/output")
def output(request: Request, node: Node, run: str, attempt: int, body: OutputBody) -> dict[str, int]:
    """Append live output."""
    parts = parts_of(request)
    plan = _plan(parts, node, run, attempt)
    if body.offset < 0:
        raise Malformed("an offset is not negative", code="offset")
    following = parts.output.append(run, attempt, body.offset, _decode(body.data), plan)
    parts.bell.ring()
    return {"next": following}


@router.post("/runs/{run}/{attempt}/files")
def files(request: Request, node: Node, run: str, attempt: int, body: FileBody) -> dict[str, str]:
    """Keep a result file."""
    parts = parts_of(request)
    plan = _plan(parts, node, run, attempt)
    parts.output.keep_file(run, attempt, body.name, _decode(body.data), body.digest, plan)
    return {"name": body.name}


def _plan(parts: Parts, node: str, run: str, attempt: int) -> Plan:
    with reading(parts.engine) as connection:
        own_attempt(connection, node, run, attempt)
        row = runs.one(connection, run)
    assert row is not None
    return Plan.from_json(json.loads(row.plan))


@router.get("/code/{digest}")
def code(request: Request, node: Node, digest: str) -> Response:
    """Return a code file that a run placed on this node names."""
    with reading(parts_of(request).engine) as connection:
        data = runs.code(connection, digest)
        if data is not None and not runs.needs_code(connection, node, digest):
            raise Denied("no run of this node needs that file", code="node")
    if data is None:
        raise NotFound("no such code file", code="code")
    return Response(data, media_type="application/octet-stream")


@router.get("/bundle", dependencies=[Depends(peer)])
def bundle(request: Request) -> dict[str, Any]:
    """Return the active policy bundle as it was published; the node verifies it itself."""
    with reading(parts_of(request).engine) as connection:
        row = bundles.active(connection)
    if row is None:
        raise NotFound("no bundle is published", code="bundle", next_step="interlock policy publish FILE")
    return {"version": row.version, "archive": base64.b64encode(bytes(row.archive)).decode()}


@router.get("/snapshot", dependencies=[Depends(peer)])
def snapshot(request: Request, nonce: Annotated[str, Query(min_length=8, max_length=128)]) -> dict[str, Any]:
    """Return the signed entitlements for a nonce."""
    parts = parts_of(request)
    with reading(parts.engine) as connection:
        body = {"nonce": nonce, "epoch": parts.desk.granting(connection).epoch, **_entitlements(connection)}
    signed = sign(SNAPSHOT, body, parts.signers.grant)
    if len(signed.payload) > MAX_SNAPSHOT:
        raise _too_large(parts, {name: len(rows) for name, rows in body.items() if isinstance(rows, list)})
    return signed.as_json()


def _too_large(parts: Parts, counts: dict[str, int]) -> Unavailable:
    """Return the refusal of a snapshot that no node would read, and leave a record: until it is smaller nodes decide
    nothing new; stops go on."""
    parts.desk.note_rarely("snapshot", Event(EventType.INCIDENT, "control", facts={
        "what": "the snapshot of entitlements is larger than nodes read", "code": "unavailable.snapshot", **counts}))
    return Unavailable(f"the entitlements are larger than {MAX_SNAPSHOT} bytes, so no node hears of them",
                       code="snapshot", next_step="revoke API keys, end memberships or retire models",
                       details=counts)


def _entitlements(connection: Connection) -> dict[str, Any]:
    """Return who may do what at this moment, as nodes hold it (docs/formats/snapshot.md)."""
    now, row = now_us(), bundles.active(connection)
    return {
        "roles": [{"person": p, "tenant": t, "role": r} for p, t, r in people.bindings(connection)],
        "programmes": [{"person": p, "programme": m} for p, m in programmes.live(connection, now)],
        "disabled": people.disabled(connection), "bundle_version": int(row.version) if row else 0,
        "keys": [{"id": k.id, "hash": k.hash, "person": k.person, "tenant": tenant, "scopes": list(k.scopes)}
                 for k, tenant in sessions.live_keys(connection, now)],
        "models": [{"name": v.model, "tenant": v.tenant, "tier": v.tier, "version": v.digest,
                    "state": registry.state_of(v), "lineage": json.loads(v.lineage)["models"]}
                   for v in registry.offered(connection)],
    }


@router.post("/spool")
def spool(request: Request, node: Node, body: SpoolBody) -> dict[str, int]:
    """Take records of this node into the ledger."""
    rows = [(r.get("seq"), _decode(str(r.get("body", "")))) for r in body.records]
    if not all(isinstance(seq, int) and not isinstance(seq, bool) for seq, _ in rows):
        raise Malformed("a record has a seq", code="record")
    taken = [(int(seq or 0), data) for seq, data in rows]
    return {"next_seq": parts_of(request).ledger.intake(node, body.stream, taken)}


@router.post("/marks")
def marks(request: Request, node: Node, body: MarksBody) -> dict[str, bool]:
    """Take the node's high-water marks, signed by the key of its certificate."""
    leaf = x509.load_pem_x509_certificate(request.scope["extensions"]["tls"]["client_cert_chain"][0].encode())
    parts_of(request).ledger.mark(node, leaf.public_key(), _decode(body.body), _decode(body.sig))
    return {"taken": True}


@router.post("/facts")
def facts(request: Request, node: Node, body: FactsBody) -> dict[str, bool]:
    """Keep what the node says of itself; a change is recorded."""
    parts, fresh = parts_of(request), body.model_dump()
    canonical(fresh)
    with writing(parts.engine) as connection:
        row = nodes.one(connection, node)
        changed = row is None or json.loads(row.facts) != fresh
        nodes.set_facts(connection, node, fresh, now_us())
        if changed:
            parts.ledger.record(Event(EventType.NODE_PROBED, f"node/{node}", facts={
                "profiles": fresh["profiles"], "tiers": fresh["tiers"]}), connection)
    return {"taken": True}
