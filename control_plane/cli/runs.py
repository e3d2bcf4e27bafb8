"""Looking at runs: runs, logs, files, why."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli.invocation import Invocation
from control_plane.cli.launch import Output, follow, save_files
from control_plane.cli.people_api import rows
from control_plane.cli.terminal import cell, fields, state, table, when


def runs(ctx: typer.Context) -> None:
    """List runs: state, tier, owner, node, times."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/runs")
    shown = [(r.get("run", r.get("id")), state(r.get("state")), r.get("tier"), r.get("owner"), r.get("node"),
              r.get("attempt"), when(r.get("created_us")), when(r.get("ended_us"))) for r in rows(answer, "runs")]
    here.terminal.result(answer, table(
        "", ["run", "state", "tier", "owner", "node", "attempt", "created", "ended"], shown))


def logs(
    ctx: typer.Context,
    run: str,
    follow_on: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Pass control characters on.")] = False,
) -> None:
    """Show the output of a run. With --json the output goes to stderr."""
    here = Invocation.of(ctx)
    api = here.api()
    output = Output(here.terminal.as_json, raw)
    last: dict[str, Any] = {}
    after = -1
    while follow_on or int(last.get("next", 0)) != after:
        after = int(last.get("next", 0))
        last = follow(here, api, run, output, after=after, attempt=int(last.get("attempt") or 0), wait=follow_on)
        if follow_on:
            break
    if here.terminal.as_json:
        here.terminal.result({"run": run, "bytes": last.get("next", 0), "ended": last.get("ended"),
                              "state": last.get("state"), "outcome": last.get("outcome")})


def files(
    ctx: typer.Context,
    run: str,
    save: Annotated[Path | None, typer.Option("--save", help="Write them into this folder.")] = None,
) -> None:
    """List the files that a run left in /work/out, with digests; `--save` fetches and checks them."""
    here = Invocation.of(ctx)
    api = here.api()
    answer: dict[str, Any] = {"files": save_files(api, run, save)} if save else api.get(f"/api/runs/{quote(run)}/files")
    shown = [(f.get("name"), f.get("bytes", f.get("size")), f.get("digest")) for f in rows(answer, "files")]
    here.terminal.result(answer, table("", ["name", "bytes", "digest"], shown))


def why(ctx: typer.Context, what: Annotated[str, typer.Argument(metavar="ID", help="A run or a call.")]) -> None:
    """Say why something was allowed or refused: the rules, the bundle, what is missing, who can grant it."""
    here = Invocation.of(ctx)
    answer = here.api().get(f"/api/why/{quote(what)}")
    found = answer.get("decisions", answer.get("items", []))
    shown = [(d.get("action"), state(d.get("effect")), d.get("code"), d.get("message"), d.get("rules"),
              str(cell(d.get("bundle")))[:23], d.get("next_step") or d.get("changes"))
             for d in found if isinstance(d, dict)]
    rest = {k: v for k, v in answer.items() if k not in ("decisions", "events", "items")}
    events = [(when(e.get("occurred_us")), e.get("type"), e.get("actor"), e.get("facts"))
              for e in answer.get("events", []) if isinstance(e, dict)]
    here.terminal.result(
        answer, fields(rest),
        table("Decisions", ["action", "effect", "code", "because", "rules", "bundle", "next step"], shown),
        table("Events", ["time (UTC)", "type", "actor", "facts"], events))
