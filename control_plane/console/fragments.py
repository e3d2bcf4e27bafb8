"""The live parts of the pages, each a small route that htmx asks again and again."""

from fastapi import APIRouter, Request, Response

from control_plane.api import looking, progress, runs
from control_plane.api.context import declare
from control_plane.console import scene
from control_plane.console.view import PageRoute, glance, render
from control_plane.parts import parts_of
from interlock.call import Action, Resource
from interlock.tier import Tier

router = APIRouter(route_class=PageRoute, include_in_schema=False, prefix="/fragments")

declare({
    ("GET", "/fragments/status"): Action.LOOK, ("GET", "/fragments/runs"): Action.LOOK,
    ("GET", "/fragments/runs/{run}"): Action.LOOK, ("GET", "/fragments/runs/{run}/progress"): Action.LOOK,
    ("GET", "/fragments/stops"): Action.LOOK,
    ("GET", "/fragments/stops/{order}"): Action.LOOK,
})


@router.get("/status")
def status(request: Request) -> Response:
    """Refresh the Status page."""
    caller, parts = glance(request, "status"), parts_of(request)
    return render(request, "_status.html", caller, s=scene.status(parts, request.app.state.faults))


@router.get("/runs")
def run_list(request: Request) -> Response:
    """Refresh the list of runs."""
    caller, parts = glance(request, "runs"), parts_of(request)
    return render(request, "_runs.html", caller, runs=scene.named(parts, runs.visible(request, caller, 200)))


@router.get("/runs/{run}")
def one_run(request: Request, run: str) -> Response:
    """Refresh one run's state and output."""
    caller, parts = glance(request, "run"), parts_of(request)
    shown = scene.run_row(parts, run)
    looking.require(request, caller, Resource("run", run, shown["tenant"], Tier(shown["tier"])),
                    own=shown["owner"] == caller.person)
    return render(request, "_run.html", caller, run=scene.run(parts, shown), output=scene.tail(parts, shown))


@router.get("/runs/{run}/progress")
def run_progress(request: Request, run: str) -> Response:
    """Refresh one run's curve and checkpoints."""
    caller = glance(request, "run")
    return render(request, "_progress.html", caller, **scene.progress(progress.progress(request, caller, run)))


@router.get("/stops")
def stop_list(request: Request) -> Response:
    """Refresh the list of stops."""
    caller = glance(request, "stops")
    return render(request, "_stops.html", caller, stops=scene.stops(parts_of(request)))


@router.get("/stops/{order}")
def one_stop(request: Request, order: str) -> Response:
    """Refresh one stop."""
    caller = glance(request, "stop")
    return render(request, "_stop.html", caller, stop=scene.stop(parts_of(request), order))
