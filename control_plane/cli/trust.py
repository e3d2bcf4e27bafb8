"""`interlock trust`: whom nodes believe when a stop is resumed, and how to change that."""

from typing import Annotated, Any

import typer
from rich.table import Table

from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import rows
from control_plane.cli.terminal import fields, table
from interlock.errors import Malformed, Untrusted
from interlock.signed import TRUST_APPROVAL, key_id, public_from_text, public_text, sign
from killswitch.trust import approval_body

trust = typer.Typer(no_args_is_help=True, help="Pinned officers: whose signatures nodes accept for a resume.")
Names = Annotated[list[str] | None, typer.Option(help="Name of a safety officer; may be given several times.")]


def _key_id(row: dict[str, Any]) -> str:
    """Return the id of the key itself; what the server says its id is counts for nothing."""
    return key_id(public_from_text(str(row.get("key", ""))))


@trust.command()
def show(ctx: typer.Context) -> None:
    """Show the list in force, who waits to be pinned, which version each node holds, and your own key's id."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/trust")
    own = key_id(here.profile.person_key().public_key()) if here.profile.key_path.exists() else ""
    shown = [(p.get("name"), _key_id(p), "pinned" if p.get("able") else "pinned, may not vote")
             for p in rows(answer, "persons")]
    shown += [(p.get("name"), _key_id(p), "waits") for p in rows(answer, "waiting")]
    nodes = [f"{n.get('node')}: {n.get('version')}" for n in rows(answer, "nodes")]
    head = fields({"version": answer.get("version"), "nodes hold": nodes, "open changes": answer.get("requests"),
                   "your key": own})
    here.terminal.result({**answer, "own_key_id": own}, head, table("", ["person", "key id", "state"], shown))
    if answer.get("warning"):
        here.terminal.note(f"WARNING: {answer['warning']}")


@trust.command()
def change(
    ctx: typer.Context,
    reason: Annotated[str, typer.Option("--reason", help="Why; it is recorded.")],
    add: Names = None,
    remove: Names = None,
) -> None:
    """Ask to pin officers or take pinned ones out. Two pinned officers then sign with: interlock approve REQUEST."""
    here = Invocation.of(ctx)
    asked = here.api().post("/api/trust/changes", {"add": add or [], "remove": remove or [], "reason": reason})
    here.terminal.result(asked, pins(asked.get("body", {})),
                         f"{asked.get('needed', 2)} of these sign with: interlock approve {asked.get('request', '')}: "
                         + ", ".join(asked.get("may_sign", [])))


def pins(body: dict[str, Any]) -> Table:
    """Return the requested list as a table; key ids are computed here, from the keys that will be signed."""
    fresh = {p.get("person") for p in rows(body, "added")}
    shown = [(p.get("name"), _key_id(p), "ADDED" if p.get("person") in fresh else "stays")
             for p in rows(body, "persons")]
    shown += [(p.get("name"), _key_id(p), "REMOVED") for p in rows(body, "removed")]
    return table(f"trust list, version {body.get('version')}", ["person", "key id", "change"], shown)


def signed_trust(here: Invocation, body: dict[str, Any], person: str) -> dict[str, Any]:
    """Return the approval that this person signs, as JSON: over the very list that was shown, digested here.

    Raises Untrusted (``untrusted.approval``) when the digest is of another list, or the list has another key for this
    person; Malformed.
    """
    listed = rows(body, "persons")
    persons = {str(p.get("person")): str(p.get("key")) for p in listed}
    version = body.get("version")
    if not isinstance(version, int) or len(persons) != len(listed):
        raise Malformed("the request holds no trust list", code="approval")
    statement = approval_body(version, persons)
    if statement["persons_digest"] != body.get("persons_digest"):
        raise Untrusted("the digest is not of the list that was shown", code="approval",
                        next_step="do not approve; tell the safety officers")
    key = here.profile.person_key()
    if persons.get(person, public_text(key.public_key())) != public_text(key.public_key()):
        raise Untrusted("this list has another key for you than yours", code="approval",
                        next_step="do not approve; tell the safety officers")
    return sign(TRUST_APPROVAL, statement, key).as_json()
