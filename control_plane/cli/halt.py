"""Stop and resume. A stop needs one person and no code; it is shown as stopped only when it is proven."""

import time
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import PeopleApi, rows
from control_plane.cli.terminal import EXIT_NOT_CONFIRMED, fields, state, table, when
from interlock.order import Scope

_OPEN = frozenset({"pending", ""})


def wait_for_proof(api: PeopleApi, order: str, wait_s: float) -> dict[str, Any]:
    """Return the stop's account when it is settled or `wait_s` seconds are over."""
    until = time.monotonic() + wait_s
    while True:
        left = max(0.0, until - time.monotonic())
        step = int(min(left, 10.0)) if left >= 1 else 0
        found = api.get(f"/api/stops/{quote(order)}", wait_s=step, wait=step)
        if found.get("state", "") not in _OPEN or left <= 0:
            return found
        time.sleep(min(0.2, left))


def show_stop(here: Invocation, found: dict[str, Any]) -> None:
    """Print one stop with its result for each node."""
    nodes = [(n.get("node"), state(n.get("result")), n.get("latency_ms"), n.get("survivors"))
             for n in found.get("nodes", []) if isinstance(n, dict)]
    shown = ("order", "scope", "actor", "reason", "state", "confirmed_ms", "epoch", "anchored")
    head: dict[str, Any] = {k: found[k] for k in shown if k in found}
    here.terminal.result(found, fields(head), table("", ["node", "result", "ms", "survivors"], nodes))


def stop(
    ctx: typer.Context,
    scope: Annotated[str, typer.Argument(help="everything, run:ID, tenant:T, subject:S, model:M or node:N.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is recorded.")] = "",
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the proof.")] = 10.0,
) -> int:
    """Stop work now. Exit 0 only when every node has PROVEN that it is dead, else 4."""
    here = Invocation.of(ctx)
    Scope.parse(scope)
    api = here.api()
    placed = api.post("/api/stop", {"scope": scope, "reason": reason.encode(errors="replace").decode()})
    with here.terminal.wait(f"stop order {placed.get('order')} is accepted; waits for the proof"):
        found = wait_for_proof(api, str(placed["order"]), wait)
    show_stop(here, {**placed, **found})
    if found.get("state") == "confirmed":
        return 0
    here.terminal.note("NOT confirmed. On the node: python -I -m killswitch stop --all --reason …")
    return EXIT_NOT_CONFIRMED


def stops(
    ctx: typer.Context,
    order: Annotated[str, typer.Argument(help="One stop order; all when left out.")] = "",
) -> None:
    """List stop orders, or show one with its proof for each node."""
    here = Invocation.of(ctx)
    if order:
        show_stop(here, here.api().get(f"/api/stops/{quote(order)}"))
        return
    answer = here.api().get("/api/stops")
    shown = [(s.get("order"), s.get("scope"), state(s.get("state")), s.get("actor"), s.get("reason"),
              s.get("confirmed_ms"), when(s.get("accepted_us")), s.get("cleared_by")) for s in rows(answer, "stops")]
    here.terminal.result(answer, table(
        "", ["order", "scope", "state", "by", "reason", "confirmed ms", "accepted", "cleared by"], shown))


def resume(
    ctx: typer.Context,
    orders: Annotated[list[str], typer.Argument(metavar="STOP_ID…", help="The stop orders to lift.")],
    reason: Annotated[str, typer.Option("--reason", help="Why; it is recorded.")],
) -> None:
    """Ask to lift exactly these stop orders. Two safety officers then sign with: interlock approve REQUEST."""
    here = Invocation.of(ctx)
    asked = here.api().post("/api/resumes", {"clears": sorted(set(orders)), "reason": reason})
    here.terminal.result(asked, fields(asked), f"{asked.get('needed', 2)} officers sign with: interlock approve "
                                              f"{asked.get('request', '')}")
