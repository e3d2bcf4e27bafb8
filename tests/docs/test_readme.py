"""The README's first promise: its `make` lines are targets, with variables that something reads."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
LINE = re.compile(r"(?:^    |`)make ([a-z]+)((?: [A-Z_]+=\S+?)*)(?=`|\s|$)", re.MULTILINE)
READERS = [ROOT / "Makefile", *(ROOT / "examples" / "demo").glob("*.py"), *(ROOT / "deploy").rglob("*.sh")]


def shown(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each `make` command that a page shows: its target and the names of its variables."""
    for target, rest in LINE.findall(text):
        yield target, [word.partition("=")[0] for word in rest.split()]


def targets() -> set[str]:
    found = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert found is not None
    rules = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return set(found[1].split()) & set(rules)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_make_line_of_a_page_is_a_target(page: Path) -> None:
    read = "".join(path.read_text() for path in READERS)
    for target, variables in shown(page.read_text()):
        assert target in targets(), target
        for name in variables:
            assert re.search(rf"\b{name}\b", read), f"nothing reads {name}"


def test_the_readme_shows_the_two_commands_and_a_wrong_one_would_be_caught() -> None:
    found = dict(shown((ROOT / "README.md").read_text()))
    assert {"demo", "test"} <= set(found)
    assert dict(shown("    make nothing NOPE=1\n")) == {"nothing": ["NOPE"]}
    assert "nothing" not in targets()


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_set_up_first(target: str) -> None:
    """A fresh clone has no environment: whatever these two do, the set-up comes before it."""
    said = subprocess.run(["make", "-n", "-B", target], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.index("deploy/setup/environment.sh") < said.index(".venv/bin/python -I")
