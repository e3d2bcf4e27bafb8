"""One word, one meaning: senses that the glossary forbids do not come back as names, and its words are in use."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
ROOMS = ("interlock", "policy", "audit", "sandbox", "killswitch", "runners", "control_plane", "kms")
# part of a name → what to say instead. `service` as a KIND of subject (a service account) is a word of the field.
FORBIDDEN = {
    "manager": "the noun of what it does",
    "service": "the noun of what it does",
    "helper": "the noun of what it does",
    "util": "the noun of what it does",
    "misc": "the noun of what it does",
    "agent": "node: an agent is an AI agent",
    "daemon": "launcher, broker or supervisor",
    "licence": "permit",
    "watchdog": "supervisor",
    "killer": "supervisor, or ladder",
    "whitelist": "pinned, or allowed",
    "blacklist": "refused",
}
# Rooms that know nothing of weights: there the word could only mean a tree head or a snapshot.
WITHOUT_WEIGHTS = ("policy", "audit", "sandbox", "killswitch")
# Where the word of another text is quoted.
QUOTED = {("audit/treehead.py", "checkpoint")}


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _parts(name: str) -> set[str]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {w for word in words for w in (word, word.removesuffix("s"))}


def offences(tree: ast.Module, stem: str) -> list[str]:
    """Return `name: what to say instead` for each forbidden name in a module."""
    found = {name for name in (stem, *_names(tree)) if _parts(name) & FORBIDDEN.keys()}
    return sorted(f"{n}: {FORBIDDEN[w]}" for n in found for w in _parts(n) & FORBIDDEN.keys())


@pytest.mark.parametrize("name", ["RunManager", "mail_service", "utils", "Watchdogs"])
def test_a_forbidden_name_is_caught(name: str) -> None:
    assert offences(ast.parse(f"{name} = 1"), "clean")
    assert offences(ast.parse(""), name)
    assert not offences(ast.parse("serviceable = tree_head = 1"), "ledger")


@pytest.mark.parametrize("room", ROOMS)
def test_no_name_has_a_forbidden_sense(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        assert offences(ast.parse(path.read_text()), path.stem) == [], path


@pytest.mark.parametrize("room", WITHOUT_WEIGHTS)
def test_a_checkpoint_is_weights_in_what_the_code_says_too(room: str) -> None:
    for path in sorted((ROOT / room).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if (name, "checkpoint") not in QUOTED:
            assert not re.search(r"checkpoint", path.read_text(), re.I), f"{name}: say tree head, or snapshot"


def words() -> list[str]:
    """Return the words that the glossary explains."""
    rows = [line.split("|")[1].strip() for line in GLOSSARY.splitlines() if line.startswith("| ")]
    return [word.strip() for row in rows[1:] for word in row.split(",")]


def test_the_glossary_explains_each_word_once() -> None:
    found = words()
    assert len(found) > 50
    assert sorted(found) == sorted(set(found))


def test_every_word_of_the_glossary_is_in_use() -> None:
    """A word that nobody uses is a promise of a thing that is not there."""
    files = [p for room in ROOMS for p in (ROOT / room).rglob("*.py")]
    said = "\n".join(p.read_text() for p in files)
    said += "\n".join(p.read_text() for p in (ROOT / "docs").rglob("*.md") if p.name != "glossary.md")
    plain = re.sub(r"[\s_]+", " ", said.lower())
    assert [w for w in words() if w.lower().replace("_", " ") not in plain] == []
