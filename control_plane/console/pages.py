"""Full pages, one function each. Data comes from the functions that answer the API, so that a page shows
nothing that its reader could not ask for."""

import json
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from control_plane.api import approvals as approvals_api
from control_plane.api import kill, ledger, progress, runs, status, why
from control_plane.api.context import Caller, declare
from control_plane.console import scene
from control_plane.console.view import PageRoute, reader, render
from control_plane.parts import parts_of
from interlock.call import Action
from interlock.errors import Refusal
from interlock.event import EventType
from interlock.order import Scope, ScopeKind
from policy.stop_rule import require_stop

router = APIRouter(route_class=PageRoute, include_in_schema=False)
PAGE = 50

declare({
    ("GET", "/"): Action.LOOK, ("GET", "/runs"): Action.LOOK, ("GET", "/runs/{run}"): Action.LOOK,
    ("GET", "/kill"): Action.LOOK, ("GET", "/kill/{order}"): Action.LOOK, ("GET", "/audit"): Action.LOOK,
    ("GET", "/approvals"): Action.LOOK, ("GET", "/approvals/{approval}"): Action.LOOK,
})


@router.get("/")
def home(request: Request) -> Response:
    """Show what an on-call person asks first."""
    caller = reader(request)
    status.status(request, caller)
    return render(request, "status.html", caller, here="/", s=scene.status(parts_of(request), request.app.state.faults))


@router.get("/runs")
def run_list(request: Request) -> Response:
    """Show the runs that the reader may see."""
    caller = reader(request)
    found = runs.listing(request, caller)["runs"]
    return render(request, "runs.html", caller, here="/runs", runs=scene.named(parts_of(request), found))


@router.get("/runs/{run}")
def one_run(request: Request, run: str) -> Response:
    """Show one run: state, output, decisions, plan."""
    caller = reader(request)
    shown = runs.one(request, caller, run)
    return render(
        request, "run.html", caller, here="/runs", run=scene.run(parts_of(request), shown),
        **scene.progress(progress.progress(request, caller, run)),
        output=scene.tail(parts_of(request), shown), decisions=why.why(request, caller, run)["decisions"],
        plan=json.dumps(shown["plan"], indent=2, ensure_ascii=False), may_stop=may_stop(caller, shown),
    )


def may_stop(caller: Caller, run: dict[str, Any]) -> bool:
    """Return whether this reader may stop this run."""
    try:
        require_stop(caller.roles, run["owner"] == caller.person, caller.kind, Scope(ScopeKind.RUN, run["run"]))
    except Refusal:
        return False
    return True


def _may_stop_everything(caller: Caller) -> bool:
    try:
        require_stop(caller.roles, False, caller.kind, Scope(ScopeKind.EVERYTHING))
    except Refusal:
        return False
    return True


@router.get("/kill")
def kill_switch(request: Request) -> Response:
    """Show the stop form and every stop with its proof. The form works without JavaScript."""
    caller, parts = reader(request), parts_of(request)
    found = runs.listing(request, caller)["runs"]
    live = [r for r in scene.named(parts, found) if r["state"] in scene.OPEN and may_stop(caller, r)]
    kill.listing(request, caller)
    return render(
        request, "kill.html", caller, here="/kill", live=live, may_stop_everything=_may_stop_everything(caller),
        stops=scene.stops(parts), scopes=scene.scopes(parts, found),
    )


@router.get("/kill/{order}")
def one_stop(request: Request, order: str) -> Response:
    """Show one stop and the result of each node."""
    caller = reader(request)
    kill.listing(request, caller)
    return render(request, "stop.html", caller, here="/kill", stop=scene.stop(parts_of(request), order))


@router.get("/audit")
def audit(
    request: Request, type: str = "", run: str = "",  # noqa: A002
    before: Annotated[int, Query(ge=0, le=ledger.MAX_POSITION)] = 0,
) -> Response:
    """Show records, newest first, and the signed tree head."""
    caller, parts = reader(request), parts_of(request)
    ledger.records(request, caller, after=-1, limit=1, type="", run="")
    rows, older = scene.records(parts, type, run, before, PAGE)
    return render(
        request, "audit.html", caller, here="/audit", rows=rows, before=older, type=type, run=run,
        types=sorted(t.value for t in EventType), head_note=ledger.head_json(parts.ledger)["note"],
    )


@router.get("/approvals")
def approval_list(request: Request) -> Response:
    """Show approval requests, newest first."""
    caller = reader(request)
    found = approvals_api.listing(request, caller)["approvals"]
    return render(request, "approvals.html", caller, here="/approvals", requests=found)


@router.get("/approvals/{approval}")
def one_approval(request: Request, approval: str) -> Response:
    """Show exactly what an approval would bind to, and the form to give it."""
    caller = reader(request)
    found = approvals_api.one(request, caller, approval)
    body = json.dumps(found["body"], indent=2, ensure_ascii=False, sort_keys=True)
    return render(request, "approval.html", caller, here="/approvals",
                  approval={**found, "body": body, "why_not": found["you_cannot"], "pins": scene.pins(found)})
