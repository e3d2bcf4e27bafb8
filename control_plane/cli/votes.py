"""Approvals: see what waits, see exactly what you would sign, approve with a fresh code, or refuse."""

import json
from typing import Annotated, Any
from urllib.parse import quote

import typer

from control_plane.cli import secret_input
from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import PeopleApi, rows
from control_plane.cli.terminal import fields, state, table, when
from control_plane.cli.trust import pins, signed_trust
from interlock.canon import digest
from interlock.errors import Malformed, Untrusted
from interlock.order import ResumeApproval
from interlock.signed import RESUME_APPROVAL, sign

Reason = Annotated[str, typer.Option("--reason", help="Why; it is recorded.")]
Code = Annotated[str | None, typer.Option("--code", help="Second-factor code (or INTERLOCK_CODE).")]


def approvals(ctx: typer.Context, request: Annotated[str, typer.Argument(help="One request.")] = "") -> None:
    """List approval requests, or show one: what it is, its digest, its votes, why you cannot vote."""
    here = Invocation.of(ctx)
    if request:
        here.terminal.result(here.api().get(f"/api/approvals/{quote(request)}"))
        return
    answer = here.api().get("/api/approvals")
    shown = [(a.get("id", a.get("request")), a.get("kind"), state(a.get("state")), _asker(a), a.get("given"),
              a.get("needed"), when(a.get("expires_us"))) for a in rows(answer, "approvals")]
    here.terminal.result(answer, table(
        "", ["request", "kind", "state", "asked by", "given", "needed", "expires"], shown))


def _asker(found: dict[str, Any]) -> object:
    return found.get("asked_by_name") or found.get("asked_by")


def body_of(found: dict[str, Any]) -> dict[str, Any]:
    """Return the body that the request is about, checked against its digest.

    Raises Untrusted (``untrusted.approval``) when body and digest differ, Malformed when there is none.
    """
    body = found.get("body")
    if isinstance(body, str):
        try:
            body = json.loads(body)
        except ValueError:
            body = None
    if not isinstance(body, dict):
        raise Malformed("the approval request holds no body", code="approval")
    if digest(body) != found.get("digest"):
        raise Untrusted("the body of the request does not match its digest", code="approval",
                        next_step="do not approve; tell the safety officers")
    return body


def signed_resume(here: Invocation, body: dict[str, Any], person: str, request: str) -> dict[str, Any]:
    """Return the resume approval that this person signs, as JSON; only for the request that was named."""
    statement = ResumeApproval.from_json({**body, "person": person})
    if statement.request != request:
        raise Untrusted("the body is about another request", code="approval")
    return sign(RESUME_APPROVAL, statement.as_json(), here.profile.person_key()).as_json()


def _vote(here: Invocation, api: PeopleApi, request: str, verb: str, words: dict[str, Any]) -> None:
    answer = api.post(f"/api/approvals/{quote(request)}/{verb}", words)
    here.terminal.result({"request": request, "vote": verb, **answer})


def approve(ctx: typer.Context, request: Annotated[str, typer.Argument(metavar="REQ")], reason: Reason = "",
            code: Code = None) -> None:
    """Approve one request after seeing what it is. A resume or a change of trust is signed with your person key."""
    here = Invocation.of(ctx)
    api = here.api()
    found = api.get(f"/api/approvals/{quote(request)}")
    body = body_of(found)
    if not here.terminal.as_json:
        _show(here, found, body)
    words: dict[str, Any] = {"reason": reason}
    if found.get("kind") == "resume":
        words["signed"] = signed_resume(here, body, here.person(), request)
    if found.get("kind") == "trust":
        words["signed"] = signed_trust(here, body, here.person())
    words["code"] = next(secret_input.codes(code, here.environ))
    _vote(here, api, request, "approve", words)


def _show(here: Invocation, found: dict[str, Any], body: dict[str, Any]) -> None:
    head = {"kind": found.get("kind"), "asked by": _asker(found), "digest": found.get("digest")}
    if found.get("kind") != "trust":
        here.terminal.err.print(fields({**head, **body}))
        return
    here.terminal.err.print(fields({**head, "reason": found.get("reason")}), pins(body))
    here.terminal.note("Nodes will believe these keys. Compare each ADDED key id with what that person tells you.")


def refuse(ctx: typer.Context, request: Annotated[str, typer.Argument(metavar="REQ")], reason: Reason = "",
           code: Code = None) -> None:
    """Refuse one request."""
    here = Invocation.of(ctx)
    words = {"reason": reason, "code": next(secret_input.codes(code, here.environ))}
    _vote(here, here.api(), request, "refuse", words)
