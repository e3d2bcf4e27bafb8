"""The ledger as people see it: records, the signed head, exports."""

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from audit.export import build
from audit.ledger import Ledger
from control_plane.api.context import SignedIn, declare, pass_gate
from control_plane.parts import parts_of
from control_plane.ticker import sequence
from interlock.call import Action, Resource
from interlock.canon import digest_bytes
from interlock.errors import NotFound
from interlock.event import Event, EventType

router = APIRouter()
MAX_POSITION = 2**53

declare({
    ("GET", "/api/audit/records"): Action.LOOK,
    ("GET", "/api/audit/head"): Action.LOOK,
    ("POST", "/api/audit/exports"): Action.EXPORT_EVIDENCE,
})


@router.get("/api/audit/records")
def records(
    request: Request, caller: SignedIn, after: Annotated[int, Query(ge=-1, le=MAX_POSITION)] = -1,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100, type: str = "", run: str = "",  # noqa: A002
) -> dict[str, Any]:
    """List records after an index, filtered by type and run."""
    pass_gate(request, caller, Action.LOOK, Resource("audit", "records", caller.tenant))
    filters: dict[str, Any] = {name: value for name, value in (("type", type), ("run", run)) if value}
    rows = parts_of(request).ledger.rows(after=after, limit=limit, **filters)
    return {"records": [row.as_json() for row in rows]}


@router.get("/api/audit/head")
def head(request: Request, caller: SignedIn) -> dict[str, Any]:
    """Return the newest signed tree head; any signed-in person may have it."""
    pass_gate(request, caller, Action.LOOK, Resource("audit", "head", caller.tenant), own=True)
    return head_json(parts_of(request).ledger)


def head_json(ledger: Ledger) -> dict[str, Any]:
    """Return the newest signed head as JSON; size 0 before the first."""
    try:
        found = ledger.head()
    except NotFound:
        return {"size": 0, "root": "", "note": "", "signed_us": 0, "vkey": ledger.vkey()}
    return {"size": found.size, "root": found.root.hex(), "note": found.note, "signed_us": found.signed_us,
            "vkey": ledger.vkey()}


@router.post("/api/audit/exports")
def make_export(request: Request, caller: SignedIn) -> Response:
    """Return a zip that anyone verifies offline with the pinned key. Making it is recorded first."""
    parts = parts_of(request)
    pass_gate(request, caller, Action.EXPORT_EVIDENCE, Resource("audit", "export", caller.tenant))
    parts.ledger.record(Event(EventType.EXPORTED, caller.id, caller.tenant, facts={"source_ip": caller.source_ip}))
    sequence(parts)
    data = build(parts.ledger)
    return Response(data, media_type="application/zip", headers={
        "content-disposition": 'attachment; filename="interlock-export.zip"', "x-digest": digest_bytes(data),
        "cache-control": "no-store"})
