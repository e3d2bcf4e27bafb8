"""Pages people when a stop is not proven in time: once a stop, by a command of the operator's choice.

The command gets the report as JSON on stdin; it is started without a shell and ended after a time limit. A hook
that fails is itself recorded: nobody may believe that people were called.
"""

import json
import subprocess
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from control_plane import proof
from control_plane.parts import Parts
from control_plane.store import orders
from control_plane.store.db import reading
from interlock.event import Event, EventType

HOOK_S = 10.0


class Pager:
    """Remembers which stops it has paged for; a restart pages again for those still unproven."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._paged: set[str] = set()

    def look(self) -> list[str]:
        """Page for every stop in force that is not proven in time; return their ids."""
        with reading(self._parts.engine) as connection:
            due = self._due(connection)
        for report in due:
            self._paged.add(report["order"])
            result = run_hook(self._parts.settings.on_unconfirmed, report)
            self._parts.desk.note(Event(EventType.STOP_UNCONFIRMED, "control", facts={
                "order": report["order"], "scope": report["scope"], "state": report["state"], "hook": result,
                "nodes": [{"node": n["node"], "result": n["result"]} for n in report["nodes"]]}))
        return [r["order"] for r in due]

    def _due(self, connection: Connection) -> list[dict[str, Any]]:
        settings = self._parts.settings
        found = []
        for row in orders.stops(connection):
            if row.cleared_by or row.id in self._paged:
                continue
            report = proof.of_row(self._parts.desk, connection, row, silent_ms=settings.silent_ms,
                                  unconfirmed_ms=settings.unconfirmed_ms)
            if report["state"] in ("not_confirmed", "unreachable"):
                found.append(report)
            elif report["state"] == "confirmed":
                self._paged.add(row.id)
        return found


def run_hook(argv: Sequence[str], report: dict[str, Any]) -> str:
    """Run the command with `report` on stdin; return ``none``, ``ok``, ``failed:N``, ``timeout`` or ``missing``."""
    if not argv:
        return "none"
    try:
        done = subprocess.run(list(argv), input=json.dumps(report).encode(), timeout=HOOK_S, check=False,
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return "timeout"
    except OSError:
        return "missing"
    return "ok" if done.returncode == 0 else f"failed:{done.returncode}"
