"""The site at a glance: status, nodes."""

import typer

from control_plane.cli.invocation import Invocation
from control_plane.cli.people_api import rows
from control_plane.cli.terminal import fields, state, table, when


def status(ctx: typer.Context) -> None:
    """Show what the console's Status page shows."""
    here = Invocation.of(ctx)
    found = here.api().get("/api/status")
    here.terminal.result(found)
    held = found.get("trust")
    if isinstance(held, dict) and held.get("warning"):
        here.terminal.note(f"WARNING: {held['warning']}. See: interlock trust show")


nodes = typer.Typer(invoke_without_command=True, help="Nodes: what they isolate, which tiers they may run.")


@nodes.callback()
def list_nodes(ctx: typer.Context) -> None:
    """List nodes: state, last heard, tiers."""
    if ctx.invoked_subcommand:
        return
    here = Invocation.of(ctx)
    answer = here.api().get("/api/nodes")
    shown = []
    for node in rows(answer, "nodes"):
        facts = node.get("facts") if isinstance(node.get("facts"), dict) else {}
        shown.append((node.get("node", node.get("id")), state(node.get("state")), when(node.get("seen_us")),
                      node.get("tiers", (facts or {}).get("tiers"))))
    here.terminal.result(answer, table("", ["node", "state", "last heard", "tiers"], shown))


@nodes.command("invite")
def invite_node(ctx: typer.Context, node: str) -> None:
    """Make a join file for a new node (administrator). It is a secret; it works once, for 10 minutes."""
    here = Invocation.of(ctx)
    made = here.api().post("/api/nodes/join-files", {"node": node})
    here.terminal.result(made, fields(made))
