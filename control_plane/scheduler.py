"""Which node takes a run: joined, heard lately by both programs, probes passed, the tier among those it may run, and
what the plan needs beside it (an environment, a gateway) on offer."""

import json
from typing import Any

from sqlalchemy import Connection, Row

from control_plane.store import nodes, runs
from control_plane.store.db import now_us
from interlock.errors import LayerMissing, NotFound, Unavailable
from interlock.order import Plan
from sandbox.profile import refuse_ranks, shape_for

SEEN_US = 30_000_000


def choose(connection: Connection, plan: Plan) -> str:
    """Return the node with the fewest open attempts that may run `plan`.

    Raises Denied (``denied.profile``: several ranks at a tier without TCP), Unavailable (``unavailable.node``: none
    joined or none heard lately; ``unavailable.gateway``), NotFound (``not_found.environment``) or LayerMissing (the
    nodes that are there may not run this tier), with what each lacks.
    """
    refuse_ranks(plan, shape_for(plan.tier))
    joined = [n for n in nodes.every(connection) if n.state == nodes.JOINED]
    if not joined:
        raise Unavailable("no node has joined", code="node", next_step="interlock up on a host, or make a join file")
    now = now_us()
    fresh = [n for n in joined if now - n.seen_us < SEEN_US and now - n.supervisor_seen_us < SEEN_US]
    if not fresh:
        raise Unavailable("no node was heard in the last 30 s", code="node",
                          next_step="see interlock nodes; is the node program running?",
                          details={"nodes": [n.id for n in joined]})
    fresh = _offering(fresh, plan)
    lacking = {n.id: why for n in fresh if (why := _lacks(n, plan))}
    able = [n for n in fresh if n.id not in lacking]
    if not able:
        raise LayerMissing(f"no node may run tier {plan.tier.value}", code="tier",
                           next_step="see interlock doctor on the node", details={"nodes": lacking})
    load = runs.open_by_node(connection)
    return str(min(able, key=lambda n: (load.get(n.id, 0), n.id)).id)


def _offering(fresh: list[Row[Any]], plan: Plan) -> list[Row[Any]]:
    """Return the nodes that offer the environment of `plan` and, for an engine, a gateway."""
    facts = {n.id: json.loads(n.facts) for n in fresh}
    found = [n for n in fresh if not plan.environment or plan.environment in facts[n.id].get("environments", [])]
    if not found:
        raise NotFound(f"no node offers the environment {plan.environment!r}", code="environment",
                       next_step=f"interlock up --environment {plan.environment}=PREFIX",
                       details={"nodes": {n: f.get("environments", []) for n, f in facts.items()}})
    able = [n for n in found if not plan.serve or facts[n.id].get("gateway") is True]
    if not able:
        raise Unavailable("no node has a gateway, so nobody could call this engine", code="gateway",
                          next_step="start the node with --gateway-port", details={"nodes": [n.id for n in found]})
    return able


def _lacks(node: Row[Any], plan: Plan) -> str:
    """Return why this node may not run `plan`, empty when it may."""
    facts = json.loads(node.facts)
    if plan.tier.value not in facts.get("tiers", []):
        missing = [str(layer.get("name")) for layer in facts.get("layers", []) if not layer.get("present")]
        return f"it may not run tier {plan.tier.value}" + (f"; missing: {', '.join(missing)}" if missing else "")
    if any(profile.get("probes", {}).get("failed", 1) for profile in facts.get("profiles", [])):
        return "a sandbox probe failed"
    return ""
