"""Who you are: enrol, login, logout, whoami, invite, keys."""

import sys
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import PeopleApi, rows
from control_plane.cli.terminal import clean, fields, table, when
from interlock.errors import Refusal, Usage
from interlock.keyfile import write_private
from interlock.signed import key_id, public_text

PasswordFile = Annotated[Path | None, typer.Option("--password-file", help="Read the password from this 0600 file.")]
Code = Annotated[str | None, typer.Option("--code", help="Second-factor code (or INTERLOCK_CODE).")]


def split_link(link: str) -> tuple[str, str]:
    """Return (address, secret) of a one-time link ``URL/enrol#SECRET``; raises Usage (``usage.link``)."""
    parts = urlsplit(link.strip())
    if not parts.fragment or parts.path.rstrip("/") != "/enrol":
        raise Usage("this is not an enrolment link", code="link", next_step="copy all of it, with what follows #")
    return f"{parts.scheme}://{parts.netloc}", parts.fragment


def login(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Your name.")],
    password_file: PasswordFile = None,
    code: Code = None,
) -> None:
    """Sign in with password and second factor; the session is kept in the profile."""
    here = Invocation.of(ctx)
    api = here.open_api()
    words = {"name": name, "password": secret_input.password(password_file),
             "code": next(secret_input.codes(code, here.environ))}
    answer = api.post("/api/login", words)
    here.profile.save({**here.profile.load(), "url": api.url, "name": name, "person": answer.get("person", ""),
                       "session": answer["session"]})
    shown = {k: v for k, v in answer.items() if k != "session"}
    here.terminal.result({"name": name, **shown, "profile": here.profile_name})


def logout(ctx: typer.Context) -> None:
    """End the session here and at the control plane."""
    here = Invocation.of(ctx)
    try:
        here.api().post("/api/logout")
    finally:
        here.profile.forget_session()
    here.terminal.result({"signed_out": True, "profile": here.profile_name})


def whoami(ctx: typer.Context) -> None:
    """Show who you are, with which roles, and how fresh your second factor is."""
    here = Invocation.of(ctx)
    here.terminal.result({**here.api().get("/api/whoami"), "url": here.address()})


def _show_phone(uri: str, secret: str, totp_file: Path | None) -> None:
    """Give the second factor's secret to the person: a new 0600 file for scripts, else QR code and text."""
    if totp_file is not None:
        write_private(totp_file, uri.encode())
        return
    import segno  # only this command draws

    sys.stderr.write("Scan this with your authenticator, or type the secret:\n")
    segno.make(uri).terminal(out=sys.stderr, compact=True)
    sys.stderr.write(f"{clean(secret)}\n")


def _confirmed(here: Invocation, api: PeopleApi, secret: str, code: str | None) -> dict[str, Any]:
    """Confirm with a code; a wrong one may be typed again, twice."""
    for attempt, given in enumerate(secret_input.codes(code, here.environ)):
        try:
            return api.post("/api/enrol/confirm", {"secret": secret, "code": given})
        except Refusal as refusal:
            if attempt >= 2 or not sys.stdin.isatty():
                raise
            here.terminal.refuse(refusal)
    raise Usage("no code was given", code="input")


def enrol(
    ctx: typer.Context,
    link: Annotated[str, typer.Argument(help="The one-time link; - reads it from stdin.")],
    name: Annotated[str | None, typer.Option("--name", help="Your name; only for the bootstrap link.")] = None,
    password_file: PasswordFile = None,
    totp_file: Annotated[Path | None, typer.Option(
        "--totp-file", help="Write the otpauth URI to this new 0600 file instead of showing it.")] = None,
    code: Code = None,
) -> None:
    """Enrol through a one-time link: password, second factor, person key; then you are signed in."""
    here = Invocation.of(ctx)
    address, secret = split_link(sys.stdin.readline() if link == "-" else link)
    api = here.open_api(here.url or address)
    key = here.profile.own_key().public_key()
    body = {"secret": secret, "password": secret_input.password(password_file, twice=True),
            "person_key": public_text(key), **({"name": name} if name else {})}
    begun = api.post("/api/enrol", body)
    _show_phone(begun["totp_uri"], begun["totp_secret"], totp_file)
    done = _confirmed(here, api, secret, code)
    here.profile.save({"url": api.url, "name": name or "", "person": done.get("person", begun.get("person", "")),
                       "session": done["session"]})
    here.terminal.result({"person": done.get("person", ""), "person_key": key_id(key), "profile": here.profile_name,
                          "key_file": str(here.profile.key_path)})


def invite(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="The new person's name.")],
    role: Annotated[list[str], typer.Option("--role", help="A role; may be given several times.")],
    tenant: Annotated[str, typer.Option("--tenant")] = "lab",
) -> None:
    """Make a one-time link for a new person. The link is a secret: hand it over in person."""
    here = Invocation.of(ctx)
    made = here.api().post("/api/invitations", {"name": name, "roles": role, "tenant": tenant})
    here.terminal.result(made, clean(made.get("link", "")),
                         f"valid until {when(made.get('expires_us'))} UTC, works once")


people = typer.Typer(invoke_without_command=True, help="People: who may do what; roles; putting somebody out.")


@people.callback()
def list_people(ctx: typer.Context) -> None:
    """List people with their roles."""
    if ctx.invoked_subcommand:
        return
    here = Invocation.of(ctx)
    answer = here.api().get("/api/people")
    shown = [(p.get("name"), p.get("tenant"), p.get("roles"), "disabled" if p.get("disabled") else "")
             for p in rows(answer, "people")]
    here.terminal.result(answer, table("", ["name", "tenant", "roles", ""], shown))


@people.command("disable")
def disable(ctx: typer.Context, name: str) -> None:
    """Put a person out at once: sessions, keys, links; his runs end with their leases."""
    here = Invocation.of(ctx)
    here.terminal.result(here.api().post(f"/api/people/{quote(name, safe='')}/disable"))


@people.command("roles")
def roles(
    ctx: typer.Context,
    name: str,
    role: Annotated[list[str] | None, typer.Option("--role", help="A role; none takes every right away.")] = None,
) -> None:
    """Replace a person's roles; he signs in again."""
    here = Invocation.of(ctx)
    here.terminal.result(here.api().post(f"/api/people/{quote(name, safe='')}/roles", {"roles": role or []}))


keys = typer.Typer(no_args_is_help=True, help="API keys: for programs, never valid where a second factor is needed.")


@keys.command("list")
def list_keys(ctx: typer.Context) -> None:
    """Show your API keys."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/keys")
    shown = [(k.get("id"), k.get("name"), k.get("scopes"), when(k.get("expires_us")), when(k.get("used_us")),
              when(k.get("revoked_us"))) for k in rows(answer, "keys")]
    here.terminal.result(answer, table("", ["id", "name", "scopes", "expires", "last used", "revoked"], shown))


@keys.command("mint")
def mint_key(
    ctx: typer.Context,
    name: str,
    scope: Annotated[list[str] | None, typer.Option("--scope")] = None,
    days: Annotated[int, typer.Option("--days", min=1, max=90)] = 30,
) -> None:
    """Make an API key. It is shown once."""
    here = Invocation.of(ctx)
    made = here.api().post("/api/keys", {"name": name, "scopes": scope or [], "days": days})
    here.terminal.result(made, fields(made))


@keys.command("revoke")
def revoke_key(ctx: typer.Context, key: str) -> None:
    """End an API key at once."""
    here = Invocation.of(ctx)
    here.terminal.result({"revoked": key, **here.api().delete(f"/api/keys/{key}")})
