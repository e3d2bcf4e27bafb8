"""`interlock doctor`: what this host isolates, which tiers it may run, what is missing and how to get it."""

import hashlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli import programs
from control_plane.cli.invocation import Invocation, RuntimeOption, StateOption
from control_plane.cli.programs import CONTROL, NODE, SUPERVISOR, Places
from control_plane.cli.terminal import fields, state, table, when
from interlock.errors import NotFound, Unavailable


def _seal(kek: Path) -> str:
    """Return a short fingerprint of the KEK, to notice that another one lies there; nothing follows from it."""
    return hashlib.sha256(b"interlock/kek-backup/v1\n" + kek.read_bytes()).hexdigest()[:16]


def _kek(places: Places) -> Path:
    return places.state / "control" / "keys" / "kek.key"


def _marker(places: Places) -> Path:
    return places.state / "kek-backup.json"


def backup_state(places: Places) -> dict[str, Any]:
    """Return ``{state: absent|unconfirmed|confirmed|unknown, …}``: did somebody confirm a backup of THIS KEK?"""
    kek = _kek(places)
    try:
        present = kek.is_file()
        mark = json.loads(_marker(places).read_bytes()) if _marker(places).exists() else {}
        if present and mark.get("kek") == _seal(kek):
            return {"state": "confirmed", "kek": str(kek), "confirmed_us": mark.get("confirmed_us", 0)}
    except PermissionError:
        return {"state": "unknown", "kek": str(kek), "next_step": "start doctor as the owner of the state"}
    except ValueError:
        present = True
    if not present:
        return {"state": "absent", "kek": str(kek), "next_step": "interlock up makes it"}
    return {"state": "unconfirmed", "kek": str(kek),
            "next_step": "copy the folder of keys to an offline medium, then: interlock doctor --confirm-backup"}


def confirm_backup(places: Places) -> dict[str, Any]:
    """Note that somebody holds a copy of the KEK; raises NotFound when there is none to copy."""
    kek = _kek(places)
    try:
        if not kek.is_file():
            raise NotFound(f"there is no KEK at {kek}", code="kek", next_step="interlock up makes it")
        mark = {"kek": _seal(kek), "confirmed_us": time.time_ns() // 1000}
        _marker(places).write_text(json.dumps(mark) + "\n")
    except PermissionError:
        raise Unavailable("the state belongs to somebody else", code="state",
                          next_step="start doctor as its owner") from None
    return backup_state(places)


def survey() -> tuple[list[dict[str, Any]], list[str]]:
    """Return the sandbox layers of this host, and the tiers that it may run."""
    from sandbox import layers  # reads /proc and the kernel; only this command wants it

    found = layers.survey()
    return [layer.as_json() for layer in found], layers.tiers(found)


def doctor(
    ctx: typer.Context,
    state_folder: StateOption = None,
    runtime: RuntimeOption = None,
    confirm: Annotated[bool, typer.Option("--confirm-backup", help="Say that you hold a copy of the KEK.")] = False,
) -> None:
    """Show what this host isolates and which tiers it may run; what is missing and how to get it."""
    here = Invocation.of(ctx)
    places = Places.of(state_folder, runtime)
    backup = confirm_backup(places) if confirm else backup_state(places)
    layers, allowed = survey()
    lives = {name: bool(programs.running(places, name)) for name in (CONTROL, SUPERVISOR, NODE)}
    report = {"layers": layers, "tiers": allowed, "root": os.geteuid() == 0, "python": sys.version.split()[0],
              "programs": lives, "kek": backup}
    shown = [(x["name"], state("present" if x["present"] else "missing"), x["detail"],
              None if x["present"] else x["how_to_get"]) for x in layers]
    word = backup["state"] if backup["state"] == "confirmed" else f"AMBER: {backup['state']}"
    facts = {"tiers": allowed or "none: no run can start here", "root": report["root"], "KEK": backup["kek"],
             "KEK backup": word, "confirmed": when(backup.get("confirmed_us")), "next step": backup.get("next_step"),
             **lives}
    here.terminal.result(report, table("", ["layer", "state", "detail", "how to get it"], shown), fields(facts))
