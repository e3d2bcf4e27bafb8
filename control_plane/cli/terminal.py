"""What a person or a script sees: tables and spinners, or exactly one JSON object with `--json`.

Text that comes from others (names, reasons, output of runs) is shown without control characters: a run
must not be able to move the cursor of the person who watches it.
"""

import json
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from interlock.errors import NotConfirmed, Refusal, Usage

EXIT_REFUSED, EXIT_USAGE, EXIT_UNAVAILABLE, EXIT_NOT_CONFIRMED = 1, 2, 3, 4
_WIDTH = 160
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def clean(text: object, *, keep: str = "") -> str:
    """Return `text` without control, format and direction characters, except those in `keep`."""
    return "".join(c if c in keep or unicodedata.category(c) not in _HIDDEN else "\N{REPLACEMENT CHARACTER}"
                   for c in str(text))


def exit_status(refusal: Refusal) -> int:
    """Return the exit status of a refusal: 1 refused, 2 usage, 3 unavailable, 4 not confirmed."""
    if isinstance(refusal, NotConfirmed):
        return EXIT_NOT_CONFIRMED
    if isinstance(refusal, Usage):
        return EXIT_USAGE
    return EXIT_UNAVAILABLE if refusal.http_status == 503 else EXIT_REFUSED


def when(micros: object) -> str:
    """Return a UTC time for people from microseconds since the epoch; a dash for 0 or nothing."""
    if not isinstance(micros, int) or micros <= 0:
        return "-"
    return datetime.fromtimestamp(micros / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


def cell(value: object) -> str:
    """Return one value as the text of a table cell."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple) and not any(isinstance(v, dict | list) for v in value):
        return clean(", ".join(str(v) for v in value) or "-")
    if isinstance(value, dict | list | tuple):
        return clean(json.dumps(value, ensure_ascii=False, sort_keys=True))
    return clean(value, keep="\n")


# What helps with a kind of refusal whose sender named nothing better.
_STEPS = {
    "usage": "interlock COMMAND --help",
    "malformed": "correct what was given, and try again",
    "untrusted": "sign in again: interlock login NAME",
    "denied": "interlock why ID says which rule decided and who can grant what is missing",
    "not_found": "look at what there is: interlock runs, approvals, stops, nodes, keys list",
    "conflict": "look at what is there already, then decide which of the two you want",
    "stopped": "interlock stops says which order; two officers resume it",
    "unavailable": "interlock doctor",
    "stale": "interlock status",
    "not_recorded": "interlock doctor; nothing runs while no record can be written",
    "layer_missing": "interlock doctor says what this host lacks and how to get it",
    "not_confirmed": "on the node: python -I -m killswitch status",
    "too_many": "wait a little and try again",
}


class Terminal:
    """Stdout for results, stderr for progress and refusals. Secrets are shown only where a command says so."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.out = self._console(stderr=False)
        self.err = self._console(stderr=True)

    @staticmethod
    def _console(*, stderr: bool) -> Console:
        stream = sys.stderr if stderr else sys.stdout
        return Console(stderr=stderr, highlight=False, markup=False, width=None if stream.isatty() else _WIDTH)

    def result(self, value: Mapping[str, Any], *shown: object) -> None:
        """Print `value` as one JSON object, or the renderables (default: its fields) for people."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            return
        for item in shown or (fields(value),):
            self.out.print(item)

    def note(self, text: str) -> None:
        """Say something beside the result, on stderr; nothing with `--json`."""
        if not self.as_json:
            self.err.print(clean(text, keep="\n"))

    @contextmanager
    def wait(self, text: str) -> Iterator[None]:
        """Show a spinner on stderr while the block runs; a plain line where there is no terminal."""
        if self.as_json:
            yield
        elif self.err.is_terminal:
            with self.err.status(Text(clean(text))):
                yield
        else:
            self.err.print(clean(text) + " …")
            yield

    def refuse(self, refusal: Refusal) -> int:
        """Show a refusal on stderr (with `--json` as an object on stdout instead); return the exit status."""
        refusal.next_step = refusal.next_step or _STEPS.get(refusal.code.partition(".")[0], "interlock --help")
        if self.as_json:
            sys.stdout.write(json.dumps({"error": refusal.as_json()}, ensure_ascii=False) + "\n")
            sys.stdout.flush()
        else:
            line = Text("refused ", style="bold red")
            line.append(f"[{clean(refusal.code)}] ", style="bold")
            line.append(clean(refusal.message))
            self.err.print(line)
            if refusal.next_step:
                self.err.print(Text("next step: " + clean(refusal.next_step), style="cyan"))
        return exit_status(refusal)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table; cells are cleaned, nothing is cut off."""
    made = Table(title=title or None, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    for row in rows:
        made.add_row(*(value if isinstance(value, Text) else Text(cell(value)) for value in row))
    return made


def fields(value: Mapping[str, Any]) -> Table:
    """Return an object as two columns: field, value."""
    made = Table(show_header=False, show_edge=False, pad_edge=False, box=None)
    made.add_column(style="bold", no_wrap=True)
    made.add_column(overflow="fold")
    for key, item in value.items():
        made.add_row(Text(clean(key)), Text(when(item) if key.endswith("_us") else cell(item)))
    return made


_COLOURS = {
    "confirmed": "bold green", "ready": "green", "live": "green", "ok": "green", "placed": "cyan", "admitted": "cyan",
    "not_confirmed": "bold red", "unreachable": "bold red", "refused": "red", "lost": "red", "tampered": "bold red",
    "incomplete": "yellow", "stopped": "magenta", "pending": "yellow", "bootstrap": "yellow", "stale": "yellow",
    "missing": "red", "present": "green",
}


def state(word: object) -> Text:
    """Return a state as coloured text; colour only repeats what the word says."""
    text = cell(word)
    return Text(text, style=_COLOURS.get(text, ""))
