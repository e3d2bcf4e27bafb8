"""`interlock partner`: who belongs to which partner programme. A safety officer enrols, each time with a fresh code."""

from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import rows
from control_plane.cli.terminal import state, table, when
from interlock.errors import StepUpRequired, Usage

partner = typer.Typer(no_args_is_help=True, help="Partner programmes: who may call what is closed to others.")

Code = Annotated[str | None, typer.Option("--code", help="Second-factor code (or INTERLOCK_CODE).")]


def _members(programme: str) -> str:
    return f"/api/programmes/{quote(programme, safe='')}/members"


@partner.command("list")
def list_partners(ctx: typer.Context) -> None:
    """List memberships: your own, and all of them for whoever may look."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/programmes")
    shown = [(m.get("programme"), m.get("name"), m.get("organisation"), state(m.get("state")), when(m.get("until_us")))
             for m in rows(answer, "members")]
    here.terminal.result(answer, table("", ["programme", "person", "organisation", "state", "until"], shown))


@partner.command("add")
def add(
    ctx: typer.Context,
    programme: Annotated[str, typer.Argument(help="The programme, such as trusted-testers.")],
    person: Annotated[str, typer.Argument(help="Name of an enrolled person.")],
    organisation: Annotated[str, typer.Option("--organisation", help="For whom the person works.")],
    days: Annotated[int, typer.Option("--days", min=1, max=365, help="How long, from now.")],
    code: Code = None,
) -> None:
    """Enrol a person, or give a membership a new end. Takes a fresh code."""
    here = Invocation.of(ctx)
    api = here.api()
    body = {"person": person, "organisation": organisation, "days": days,
            "code": next(secret_input.codes(code, here.environ))}
    here.terminal.result(api.post(_members(programme), body))


@partner.command("end")
def end(ctx: typer.Context, programme: str, person: str, code: Code = None) -> None:
    """End a membership at once. Nodes hear of it within seconds."""
    here = Invocation.of(ctx)
    api, path = here.api(), f"{_members(programme)}/{quote(person, safe='')}"
    try:
        answer: dict[str, Any] = api.send("DELETE", path, json={}).json()
    except StepUpRequired as refusal:
        try:
            given = next(secret_input.codes(code, here.environ))
        except Usage:
            raise refusal from None
        answer = api.send("DELETE", path, json={"code": given}).json()
    here.terminal.result(answer)
