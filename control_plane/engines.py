"""Engines of versions: warm, gone, retired.

A node says that an engine is warm; the control plane believes it for an attempt that is placed on that node, live,
not stopped, and serves a version that may be served. A retired version is served by nobody: its engines are stopped
by stop orders for their runs, and no attempt that names it is placed again (control_plane/registry.py, rule 4).
"""

import json
from typing import Any

from sqlalchemy import Connection, Row

from control_plane import registry as rules
from control_plane.desk import refuse_if_stopped
from control_plane.lifecycle import own_attempt
from control_plane.parts import Parts
from control_plane.store import registry, runs
from control_plane.store.db import now_us, reading, writing
from interlock.errors import Conflict, Unavailable
from interlock.event import Event, EventType
from interlock.order import Labels, Plan, Scope, ScopeKind


def ready(parts: Parts, node: str, run: str, attempt: int) -> dict[str, Any]:
    """Take a node's word that the engine of this attempt is warm; its version is serving from now on.

    Raises NotFound, Denied (``denied.node``), Conflict (no engine, over, retired), Halted (stopped) or Unavailable
    (``unavailable.run_state``: not live here yet; the node says it again).
    """
    with writing(parts.engine) as connection:
        row = own_attempt(connection, node, run, attempt)
        plan = _engine_of(connection, row)
        refuse_if_stopped(parts.desk.standing(connection), Labels.from_json(json.loads(row.labels)))
        version = rules.found(connection, plan.weights[0])
        if version.state not in registry.OFFERED:
            raise rules.refuse_state(version)
        if registry.add_engine(connection, run, attempt, version.digest, now_us()):
            parts.ledger.record(Event(EventType.ENGINE_READY, f"node/{node}", version.tenant, run, facts={
                "attempt": attempt, "node": node, "version": version.digest, "model": version.model}), connection)
        if version.state == registry.APPROVED:
            rules.moved(parts, connection, version, registry.SERVING, f"node/{node}", engine=run)
    parts.bell.ring()
    return {"version": version.digest, "model": version.model, "state": registry.SERVING}


def _engine_of(connection: Connection, attempt: Row[Any]) -> Plan:
    """Return the plan of a live engine attempt; raises Conflict or Unavailable."""
    run = runs.one(connection, attempt.run)
    assert run is not None
    plan = Plan.from_json(json.loads(run.plan))
    if not plan.serve:
        raise Conflict("that run is no engine", code="engine", next_step="interlock model show NAME lists engines")
    if run.attempt != attempt.attempt or attempt.state in runs.OVER:
        raise Conflict(f"that attempt is {attempt.state}", code="run_state", next_step="see interlock runs")
    if attempt.state != "live":
        raise Unavailable("that attempt is not live here yet", code="run_state", next_step="say it again")
    return plan


def keep_states(parts: Parts) -> None:
    """Bring the state of each version in step with its engines: the last one ended, or a lost one is back."""
    with reading(parts.engine) as connection:
        if not registry.out_of_step(connection):
            return
    with writing(parts.engine) as connection:
        for row, to in registry.out_of_step(connection):
            rules.moved(parts, connection, row, to, "control")
    parts.bell.ring()


def stop_makers(parts: Parts) -> list[str]:
    """Stop each open run that made a version of a stopped model, or of a descendant, and return the orders.

    Its labels are from before the version was registered, so the stop of the model does not cover it, and it holds
    the weights. Resuming it takes two officers, as any run does. Raises Unavailable.
    """
    with reading(parts.engine) as connection:
        standing = parts.desk.standing(connection)
        stops = [s for s in standing.active if s.scope.kind is ScopeKind.MODEL]
        found = registry.makers(connection) if stops else []
        due = {run.id: (stop, version) for run, version in found for stop in stops
               if stop.scope.id in (version.model, *json.loads(version.lineage)["models"])
               and standing.stopped(_labels(connection, run)) is None}
    return [parts.desk.accept_stop(
        Scope(ScopeKind.RUN, run), stop.actor,
        f"it made {version.model}@{version.number}, and {stop.scope} is stopped by {stop.id}").order.id
        for run, (stop, version) in due.items()]


def retire(parts: Parts, version: str, by: str) -> list[str]:
    """Retire a version for good and stop its engines; return the stop orders. Again it only stops what still runs.

    Raises NotFound, Conflict (it moved meanwhile) or Unavailable (a stop could not be kept).
    """
    with writing(parts.engine) as connection:
        row = rules.found(connection, version)
        if row.state != registry.RETIRED:
            rules.moved(parts, connection, row, registry.RETIRED, by)
    with reading(parts.engine) as connection:
        standing = parts.desk.standing(connection)
        left = [run.id for run, _ in registry.engines_of(connection, version)
                if standing.stopped(_labels(connection, run)) is None]
    reason = f"{row.model}@{row.number} is retired"
    return [parts.desk.accept_stop(Scope(ScopeKind.RUN, run), by, reason).order.id for run in left]


def _labels(connection: Connection, run: Row[Any]) -> Labels:
    attempt = runs.attempt(connection, run.id, run.attempt)
    assert attempt is not None
    return Labels.from_json(json.loads(attempt.labels))
