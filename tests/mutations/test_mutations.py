"""Remove one guard; a named test must fail. A mutation that no test notices fails the run.

Each worker has one copy of the tree; the unmutated copy must pass first, else a failure would prove nothing.
"""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutations import guards, guards_models
from tests.mutations.tree import Mutation, apply, make, outcome, undo

pytestmark = [pytest.mark.mutation, pytest.mark.timeout(200)]
CORE, MORE = guards.CORE + guards_models.CORE, guards.MORE + guards_models.MORE
WANTED = CORE + MORE if os.environ.get("INTERLOCK_ALL_MUTATIONS") == "1" else CORE


@pytest.fixture(scope="session")
def copy() -> Iterator[tuple[Path, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="ilm-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield folder, make(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_copy_itself_is_green(copy: tuple[Path, Path]) -> None:
    folder, python = copy
    done = outcome(folder, python, "tests/policy/test_gate.py")
    assert done.returncode == 0, done.stdout[-2000:]
    where = outcome(folder, python, "tests/test_values.py")
    assert where.returncode == 0, where.stdout[-2000:]


def test_names_of_mutations_are_distinct_and_their_guards_exist() -> None:
    every = CORE + MORE
    assert len({m.name for m in every}) == len(every)
    for one in every:
        text = (Path(__file__).resolve().parents[2] / one.file).read_text()
        assert text.count(one.old) == 1, f"{one.name}: {text.count(one.old)} places in {one.file}"


@pytest.mark.parametrize("mutation", WANTED, ids=lambda m: m.name)
def test_a_removed_guard_is_noticed(copy: tuple[Path, Path], mutation: Mutation) -> None:
    if mutation.root and os.geteuid() != 0:
        pytest.skip("this guard is tested with real processes, which need root")
    folder, python = copy
    text = apply(folder, mutation)
    try:
        done = outcome(folder, python, mutation.test)
    finally:
        undo(folder, mutation, text)
    assert done.returncode == 1, f"nobody noticed: {mutation.name}\n{done.stdout[-1500:]}"
    assert "= FAILURES =" in done.stdout, f"it failed for another reason: {mutation.name}\n{done.stdout[-1500:]}"
