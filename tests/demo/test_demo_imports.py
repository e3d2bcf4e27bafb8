"""The demo is a client: its imports are the standard library and what a user may install, never a room."""

import ast
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "demo"
ALLOWED = {"httpx", "openai", "pyotp", "rich"}
BANNED = {"sqlite3", "ctypes", "importlib", "runpy"}
INSIDE = {"count_docs", "hostile"}


def imported(source: str) -> set[str]:
    """Return the top-level names that a module imports, also by call."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("__import__", "import_module", "exec", "eval"):
            found.add("importlib")
    return found


def offences(source: str, own: set[str]) -> set[str]:
    """Return what a file of the demo must not import."""
    names = imported(source)
    return (names - set(sys.stdlib_module_names) - ALLOWED - own) | (names & BANNED)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda p: p.stem)
def test_the_demo_imports_nothing_of_the_rooms_and_opens_no_database(path: Path) -> None:
    own = {p.stem for p in FOLDER.glob("*.py")} - INSIDE
    assert not offences(path.read_text(), own if path.stem not in INSIDE else set())


@pytest.mark.parametrize("line", [
    "import policy.gate", "from interlock.signed import verify", "import sqlite3", "import sqlalchemy",
    "__import__('audit')", "from control_plane import desk"])
def test_a_planted_import_is_found(line: str) -> None:
    assert offences(line, {"stage", "walk"})
    assert not offences("import json\nimport httpx\nfrom stage import Stage\n", {"stage", "walk"})


@pytest.mark.parametrize("name", sorted(INSIDE))
def test_what_runs_inside_needs_the_standard_library_alone(name: str) -> None:
    assert imported((FOLDER / f"{name}.py").read_text()) <= set(sys.stdlib_module_names)
