"""`interlock model`: register what a run trained, have it approved, serve it, retire it.

A version is named MODEL@N; without @N the newest that fits. The plan of an engine is made here too, so that a second
factor is given for exactly what this command believes is started, whatever the control plane says.
"""

import time
from collections.abc import Collection, Iterator
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.launch import status_of, step_up
from control_plane.cli.people_api import PeopleApi, rows
from control_plane.cli.terminal import fields, state, table, when
from control_plane.engine_plan import engine_plan
from interlock.call import Action
from interlock.errors import Denied, NotFound, StepUpRequired, Unavailable, Untrusted, Usage
from interlock.tier import tier_of

model = typer.Typer(no_args_is_help=True, help="Models: register, approve, serve and retire their versions.")

POLL_S = 1.0
ANY, OFFERED = ("draft", "approved", "serving", "retired"), ("approved", "serving")
Named = Annotated[str, typer.Argument(metavar="MODEL[@N]", help="A version; without @N the newest that fits.")]


def chosen(api: PeopleApi, word: str, states: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (model, version) of ``MODEL@N``, or of ``MODEL`` its newest version in one of `states`.

    Raises Usage (``usage.version``), NotFound (``not_found.version``) or what the control plane refuses.
    """
    name, at, number = word.partition("@")
    if not name or (at and not (number.isascii() and number.isdigit())):
        raise Usage("a version is named MODEL or MODEL@N", code="version", next_step="interlock model list")
    found = api.get(f"/api/models/{quote(name, safe='')}")
    fitting = [v for v in rows(found, "versions")
               if (v.get("number") == int(number) if at else v.get("state") in states)]
    if not fitting:
        raise NotFound(f"{word}: no such version" if at else f"{name} has no version that is {' or '.join(states)}",
                       code="version", next_step=f"interlock model show {name}")
    return found, max(fitting, key=lambda v: int(v.get("number", 0)))


def _path(version: dict[str, Any], verb: str) -> str:
    return f"/api/versions/{quote(str(version['version']), safe=':')}/{verb}"


@model.command("register")
def register(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The model; it is made when it is new.")],
    run: Annotated[str, typer.Option("--run", help="The run that saved the weights.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Its step; default: the newest weights.")] = None,
    tier: Annotated[str | None, typer.Option("--tier", help="At least that of model, run and parents.")] = None,
) -> None:
    """Register a checkpoint of a run as the next version of a model."""
    here = Invocation.of(ctx)
    body = {"run": run, "step": step, "tier": tier}
    path = f"/api/models/{quote(name, safe='')}/versions"
    here.terminal.result(here.api().post(path, {k: v for k, v in body.items() if v is not None}))


@model.command("list")
def list_models(ctx: typer.Context) -> None:
    """List models with their versions."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/models")
    shown = [(f"{m.get('name')}@{v.get('number')}", v.get("tier"), state(v.get("state")), _warm(v), v.get("run"),
              v.get("step"), _parents(v), str(v.get("version"))[:19], when(v.get("created_us")))
             for m in rows(answer, "models") for v in rows(m, "versions")]
    here.terminal.result(answer, table(
        "", ["version", "tier", "state", "engines", "run", "step", "from models", "digest", "registered"], shown))


def _warm(version: dict[str, Any]) -> str:
    engines = rows(version, "engines")
    return f"{sum(e.get('ready') is True for e in engines)} of {len(engines)} ready" if engines else ""


def _parents(version: dict[str, Any]) -> Any:
    lineage = version.get("lineage")
    return lineage.get("models") if isinstance(lineage, dict) else ""


@model.command("show")
def show(ctx: typer.Context, named: Named) -> None:
    """Show a model with its versions; of one version also its lineage and engines."""
    here = Invocation.of(ctx)
    api, at = here.api(), "@" in named
    if not at:
        found = api.get(f"/api/models/{quote(named, safe='')}")
        shown = [(v.get("number"), v.get("tier"), state(v.get("state")), _warm(v), v.get("run"), v.get("step"),
                  v.get("version")) for v in rows(found, "versions")]
        head = {k: v for k, v in found.items() if k != "versions"}
        here.terminal.result(found, fields(head), table(
            "Versions", ["number", "tier", "state", "engines", "run", "step", "digest"], shown))
        return
    found, version = chosen(api, named, ANY)
    engines = [(e.get("run"), e.get("attempt"), e.get("node"), state(e.get("state")), e.get("ready"))
               for e in rows(version, "engines")]
    lineage = version.get("lineage")
    head = {k: v for k, v in version.items() if k not in ("engines", "lineage")}
    here.terminal.result(
        {**version, "tenant": found.get("tenant")}, fields({**head, **(lineage if isinstance(lineage, dict) else {})}),
        table("Engines", ["run", "attempt", "node", "state", "ready"], engines))


@model.command("submit")
def submit(ctx: typer.Context, named: Named) -> None:
    """Ask for approval of a version: officers approve exactly what is registered. Default: the newest draft."""
    here = Invocation.of(ctx)
    api = here.api()
    _, version = chosen(api, named, ("draft",))
    answer = api.post(_path(version, "submit"))
    here.terminal.result({"version": version["version"], **answer})
    here.terminal.note(f"{answer.get('needed')} officer(s) approve with: interlock approve {answer.get('request')}")


@model.command("serve")
def serve(
    ctx: typer.Context,
    named: Named,
    detach: Annotated[bool, typer.Option("--detach", help="Return when the engine is placed.")] = False,
    limit_s: Annotated[int, typer.Option("--limit", min=1, help="Seconds to wait until it is ready.")] = 600,
    code_otp: Annotated[str | None, typer.Option("--code-otp", help="Second-factor code (or INTERLOCK_CODE).")] = None,
) -> int:
    """Start an engine of an approved version; returns when it answers. Default: the newest approved version."""
    here = Invocation.of(ctx)
    api = here.api()
    found, version = chosen(api, named, OFFERED)
    placed = _started(here, api, found, version, secret_input.codes(code_otp, here.environ))
    run, name = str(placed["run"]), f"{found['name']}@{version['number']}"
    here.terminal.note(f"engine {run} of {name} is placed; stop it with: interlock stop run:{run}")
    if detach:
        here.terminal.result(placed)
        return 0
    try:
        with here.terminal.wait(f"{name} loads on {placed.get('node')}"):
            engine = _ready(api, str(found["name"]), run, limit_s)
    except KeyboardInterrupt:
        here.terminal.note(f"the engine goes on: interlock model show {name}; interlock logs --follow {run}")
        return 130
    here.terminal.result({**placed, **engine, "state": "serving"})
    return 0


def _started(
    here: Invocation, api: PeopleApi, found: dict[str, Any], version: dict[str, Any], codes: Iterator[str]
) -> dict[str, Any]:
    """Return the answer of the serve route, after the second factor where the tier needs one."""
    plan = engine_plan(str(version["version"]), str(found["name"]), tier_of(version.get("tier")),
                       str(found.get("tenant")))
    bound, proof = plan.digest(), ""
    for _ in range(4):
        try:
            return api.post(_path(version, "serve"), {"step_up": proof} if proof else {})
        except StepUpRequired as refusal:
            if refusal.details.get("bound") not in (None, "", bound):
                raise Untrusted("the control plane would start another engine than the one that was named",
                                code="plan", next_step="give no code; tell the safety officers") from None
            here.terminal.note(f"{refusal.message} (bound to {bound})")
            try:
                code = next(codes)
            except Usage:
                raise refusal from None
            proof = step_up(api, code, Action.SERVE, bound)
    raise Denied("the control plane keeps asking for the same", code="loop")


def _ready(api: PeopleApi, name: str, run: str, limit_s: float) -> dict[str, Any]:
    """Return the engine's row once it is ready; an attempt that is started again by itself is waited for.

    Raises what ended it, or Unavailable (``unavailable.engine``).
    """
    until, after, attempt = time.monotonic() + limit_s, 0, 0
    while time.monotonic() < until:
        for version in rows(api.get(f"/api/models/{quote(name, safe='')}"), "versions"):
            for engine in rows(version, "engines"):
                if engine.get("run") == run and engine.get("ready") is True:
                    return engine
        last = api.get(f"/api/runs/{quote(run)}/output", wait_s=POLL_S, after=after, wait=0)
        if last.get("ended"):
            status = status_of(last)
            raise Unavailable(f"the engine ended with status {status} before it was ready", code="engine",
                              next_step=f"interlock logs {run}", details={"run": run, "outcome": last.get("outcome")})
        now = int(last.get("attempt") or 0)
        after, attempt = (0 if now != attempt else int(last.get("next", after))), now
        time.sleep(POLL_S)
    raise Unavailable(f"the engine is not ready after {limit_s} s", code="engine",
                      next_step=f"interlock logs {run}; interlock model show {name}", details={"run": run})


@model.command("retire")
def retire(
    ctx: typer.Context, named: Annotated[str, typer.Argument(metavar="MODEL@N", help="The version, with its number.")]
) -> None:
    """Retire a version for good: its engines are stopped and nothing loads it again."""
    if "@" not in named:
        raise Usage("name the version that is retired: MODEL@N", code="version", next_step="interlock model list")
    here = Invocation.of(ctx)
    api = here.api()
    _, version = chosen(api, named, ANY)
    here.terminal.result(api.post(_path(version, "retire")))
