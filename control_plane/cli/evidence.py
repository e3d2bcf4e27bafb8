"""`interlock audit`: records, signed head, export; `verify` works offline with a pinned key."""

from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.invocation import Invocation
from control_plane.cli.new_file import write_new
from control_plane.cli.people_api import rows
from control_plane.cli.terminal import fields, state, table, when
from interlock.canon import digest_bytes
from interlock.errors import Unavailable

audit = typer.Typer(no_args_is_help=True, help="Evidence: what was recorded, and the proof that nothing was changed.")
_EXIT = {"ok": 0, "tampered": 1, "incomplete": 2}


@audit.command()
def head(ctx: typer.Context) -> None:
    """Show the newest signed tree head."""
    here = Invocation.of(ctx)
    here.terminal.result(here.api().get("/api/audit/head"))


@audit.command()
def records(
    ctx: typer.Context,
    after: Annotated[int | None, typer.Option("--after", help="Index to start behind.")] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=1000)] = 50,
    type_: Annotated[str, typer.Option("--type", help="An event type, for example gate.decided.")] = "",
    run: Annotated[str, typer.Option("--run")] = "",
) -> None:
    """List records."""
    here = Invocation.of(ctx)
    answer = here.api().get("/api/audit/records", after=after, limit=limit, type=type_, run=run)
    shown = []
    for row in rows(answer, "records"):
        found = row.get("event")
        event: dict[str, Any] = found if isinstance(found, dict) else row
        shown.append((row.get("index", row.get("n")), when(event.get("occurred_us")), event.get("type"),
                      event.get("actor"), event.get("run"), event.get("facts")))
    here.terminal.result(answer, table("", ["index", "time (UTC)", "type", "actor", "run", "facts"], shown))


@audit.command()
def export(ctx: typer.Context, out: Annotated[Path, typer.Argument(help="The new zip file.")]) -> None:
    """Write an export that anyone can verify offline. Making it is recorded."""
    here = Invocation.of(ctx)
    with here.terminal.wait("builds the export"):
        data = here.api().send("POST", "/api/audit/exports", wait_s=60, json={}).content
    write_new(out, data)
    here.terminal.result({"file": str(out), "bytes": len(data), "sha256": digest_bytes(data)})


@audit.command()
def verify(
    ctx: typer.Context,
    export_file: Annotated[Path, typer.Argument(metavar="EXPORT")],
    key: Annotated[Path | None, typer.Option("--key", help="The pinned ledger.vkey, kept apart.")] = None,
) -> int:
    """Verify an export offline. Exit 0 ok, 1 tampered, 2 incomplete (also without a pinned key)."""
    from audit.verify import verify as verify_export

    here = Invocation.of(ctx)
    try:
        pinned = key.read_text() if key else ""
    except OSError as error:
        raise Unavailable(f"cannot read {key}: {error.strerror}", code="file") from None
    report = verify_export(export_file, pinned)
    found = report.as_json()
    here.terminal.result(found, fields({**found, "status": found.get("status")}), state(found.get("status")))
    return _EXIT.get(str(found.get("status")), 1)
