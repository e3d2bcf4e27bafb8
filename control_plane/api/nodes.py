"""Nodes as people see them: join files, the list, revocation."""

import json
import secrets
from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import StringConstraints
from sqlalchemy import Engine

from control_plane.api.context import Body, SignedIn, declare, pass_gate
from control_plane.certificates import Authority, fingerprint, node_id
from control_plane.order_log import OrderLog
from control_plane.parts import parts_of
from control_plane.settings import Settings
from control_plane.store import nodes
from control_plane.store.db import now_us, reading, writing
from interlock.call import Action, Resource
from interlock.errors import Conflict, NotFound
from interlock.event import Event, EventType

router = APIRouter()
SECRET_US = 600_000_000

declare({
    ("POST", "/api/nodes/join-files"): Action.JOIN_NODE,
    ("GET", "/api/nodes"): Action.LOOK,
    ("POST", "/api/nodes/{node}/revoke"): Action.JOIN_NODE,
})


class JoinBody(Body):
    """`node` becomes the node's id for ever."""

    node: Annotated[str, StringConstraints(min_length=1, max_length=63)]


def make_join_file(
    engine: Engine, log: OrderLog, authority: Authority, settings: Settings, node: str, made_by: str
) -> dict[str, str]:
    """Return a join file for a new node; its secret works once, for 10 minutes, and is kept as a hash.

    Raises Malformed (id), Conflict (``conflict.node``: that id has joined before) or Unavailable.
    """
    node_id(node)
    if any(r["node"] == node for r in log.enrolled()):
        raise Conflict(f"the node {node} has joined before", code="node",
                       next_step="a reinstalled machine joins under a new node id")
    secret = secrets.token_urlsafe(32)
    with writing(engine) as connection:
        nodes.add_secret(connection, secret, node, made_by, now_us() + SECRET_US)
    return {"url": settings.nodes_url, "ca_sha256": fingerprint(authority.certificate), "node": node,
            "secret": secret}


@router.post("/api/nodes/join-files")
def join_file(request: Request, caller: SignedIn, body: JoinBody) -> dict[str, str]:
    """Make a join file. It is a secret and is shown once."""
    parts = parts_of(request)
    caller.require_person()
    pass_gate(request, caller, Action.JOIN_NODE, Resource("node", node_id(body.node), caller.tenant))
    parts.ledger.record(Event(EventType.NODE_INVITED, caller.person, caller.tenant, facts={"node": body.node}))
    return make_join_file(
        parts.engine, parts.desk.log, parts.signers.authority, parts.settings, body.node, caller.person)


@router.post("/api/nodes/{node}/revoke")
def revoke(request: Request, caller: SignedIn, node: str) -> dict[str, str]:
    """Refuse a node from now on. It still must answer for stops: it may hold runs."""
    parts = parts_of(request)
    caller.require_person()
    pass_gate(request, caller, Action.JOIN_NODE, Resource("node", node_id(node), caller.tenant))
    with writing(parts.engine) as connection:
        if not nodes.revoke(connection, node):
            raise NotFound("no such joined node", code="node")
        parts.ledger.record(Event(EventType.NODE_REFUSED, caller.person, caller.tenant, facts={
            "node": node, "why": "revoked"}), connection)
    return {"node": node, "state": nodes.REVOKED}


def shown(row: Any) -> dict[str, Any]:
    """Return a node's row as JSON."""
    facts = json.loads(row.facts)
    return {"node": row.id, "state": row.state, "joined_us": row.joined_us, "seen_us": row.seen_us,
            "supervisor_seen_us": row.supervisor_seen_us, "echo_us": row.echo_us, "boot_id": row.boot_id,
            "tiers": facts.get("tiers", []), "facts": facts}


@router.get("/api/nodes")
def listing(request: Request, caller: SignedIn) -> dict[str, Any]:
    """List nodes with what they isolate and which tiers they may run."""
    pass_gate(request, caller, Action.LOOK, Resource("node", "all", caller.tenant), own=True)
    with reading(parts_of(request).engine) as connection:
        found = [shown(n) for n in nodes.every(connection)]
    # Who has no role (a partner) is not told what a host lacks and where its data lies.
    return {"nodes": found if caller.roles else [{**n, "boot_id": "", "facts": {}} for n in found]}
