"""Pages cannot drift: each path that they name exists, each command that they show is one, the example verifies."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi import FastAPI
from typer.main import get_command

from control_plane.__main__ import parser as control_plane_words
from control_plane.api import node_routes
from control_plane.api.context import declared
from control_plane.app import ROUTERS
from control_plane.cli.command import app
from control_plane.cli.invocation import hoist
from interlock.signed import FORMATS, STOP, Signed, key_id, public_from_text, verify
from killswitch.__main__ import _parser as killswitch_words
from runners.__main__ import _words as runners_words

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
ROOMS = ("interlock", "policy", "audit", "kms", "sandbox", "killswitch", "runners", "control_plane")
TOP = (*ROOMS, "migrations", "docs", "tests", "deploy", "examples", "bench")
PATH = re.compile(rf"(?<![\w/.-])((?:{'|'.join(TOP)})/[\w/.,{{}}*-]*)")
LINK = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")
PARSERS = {"killswitch": killswitch_words, "runners": runners_words, "control_plane": control_plane_words}


def _spread(path: str) -> Iterator[str]:
    """Yield `a/{b,c}.md` as `a/b.md` and `a/c.md`."""
    found = re.fullmatch(r"([^{]*)\{([^}]*)\}(.*)", path)
    if found is None:
        yield path
        return
    for part in found[2].split(","):
        yield from _spread(found[1] + part + found[3])


def _missing(text: str) -> list[str]:
    paths = {p.rstrip(".,") for found in PATH.findall(text) for p in _spread(found.rstrip(".,"))}
    paths = {p for p in paths if re.search(r"\.\w+$|/$", p)}  # `interlock/stop/v1` is a format
    return sorted(p for p in paths if not list(ROOT.glob(p.rstrip("/") or p)))


def test_a_path_that_is_not_there_is_caught() -> None:
    assert _missing("see `audit/{verify,nothing}.py` and tests/nowhere/") == ["audit/nothing.py", "tests/nowhere/"]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_leads_somewhere(page: Path) -> None:
    text = page.read_text()
    assert _missing(text) == []
    assert [to for to in LINK.findall(text) if not (page.parent / to).exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_page_and_file_that_the_code_names_is_there(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        named = re.findall(r"docs/[\w/{},.-]+\.md", path.read_text())
        assert _missing(" ".join(named)) == [], path


def _shown(page: Path) -> Iterator[tuple[str, bool]]:
    """Yield the commands of a page, each with whether it is whole: a line of a block is, a mention in a text is not."""
    text = page.read_text()
    lines = [(line.strip(), True) for line in text.splitlines() if line.startswith("    ")]
    for line, whole in [*lines, *((s, False) for s in re.findall(r"`((?:sudo )?(?:interlock|python) [^`]+)`", text))]:
        command = re.split(r"\s+#\s", line.removeprefix("sudo "))[0]
        synopsis = re.search(r"[\[|]", command) or command.endswith("…")
        if command.startswith(("interlock ", "python -I -m ")) and not synopsis:
            yield command, whole


COMMANDS = sorted({(str(page.relative_to(ROOT)), *shown) for page in PAGES for shown in _shown(page)})
MISSING = re.compile(r"[Mm]issing|is required|are required")


def _parse(words: list[str]) -> None:
    """Raise unless `words` are a command of `interlock` with the options and arguments that it has."""
    command = get_command(app)
    context = command.make_context("interlock", hoist(words))
    rest = [*context._protected_args, *context.args]
    while hasattr(command, "resolve_command"):
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if hasattr(command, "resolve_command") and not rest:
            return


def test_there_are_commands_and_a_wrong_one_is_caught() -> None:
    assert len(COMMANDS) > 40
    _parse(["stop", "run:run_1", "--reason", "x"])
    for wrong in (["login", "--name", "ada"], ["halt"], ["policy", "sing", "x"], ["stop"]):
        with pytest.raises(Exception, match=r"[Nn]o such|[Mm]issing"):
            _parse(wrong)


@pytest.mark.parametrize(("page", "line", "whole"), COMMANDS)
def test_a_command_that_a_page_shows_is_a_command(
    page: str, line: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = shlex.split(line.replace("…", ""))
    try:
        if words[0] == "interlock":
            _parse(words[1:])
        else:
            PARSERS[words[3]]().parse_args(words[4:])
    except (Exception, SystemExit) as refused:
        said = f"{refused} {type(refused).__name__} {capsys.readouterr().err}"
        assert not whole, f"{page}: {line}: {said}"
        assert words[-1] == "--version" or MISSING.search(said), f"{page}: {line}: {said}"


def test_the_example_of_a_signed_value_verifies() -> None:
    text = (ROOT / "docs" / "formats" / "signed-value.md").read_text()
    block = re.search(r"```json\n(.*?)```", text, re.S)
    pinned = re.search(r"public key `([^`]+)`", text)
    assert block is not None
    assert pinned is not None
    key = public_from_text(pinned[1])
    body = verify(Signed.from_json(json.loads(block[1])), STOP, {key_id(key): key})
    assert body["actor"] == "otto"
    assert [f for f in FORMATS if f"`{f}`" not in text] == []


def test_every_route_stands_in_the_seams() -> None:
    text = (ROOT / "docs" / "decisions" / "0001-seams.md").read_text()
    people = {path for _, path in declared() if path.startswith("/api/")}
    link = FastAPI()
    node_routes.install(link)
    nodes = set(link.openapi()["paths"])
    assert len(ROUTERS) > 9
    assert len(people) > 25
    assert len(nodes) > 14
    named = set(re.findall(r"`?(?:GET |POST |DELETE )?(/[\w/.-]+)", text))
    lacking = []
    for path in sorted(people | nodes):
        upper = re.sub(r"\{(\w+)\}", lambda m: m[1].upper(), path)
        plain = re.sub(r"\{\w+\}", "ID", path)
        ends = {"/" + "/".join(upper.split("/")[n:]) for n in range(4, upper.count("/") + 1)}  # `…/approve` `/refuse`
        if not ({upper, plain} | ends) & named:
            lacking.append(path)
    assert lacking == []
