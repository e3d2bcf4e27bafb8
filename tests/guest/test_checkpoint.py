"""Checkpoints as a training script sees them. The cases run in the guest environment, a few processes in all."""

import ast
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from interlock import leash, wire
from runners import broker
from tests.guest.stand_in_broker import RUN, StandIn
from tests.runners.door import UID, Door

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-guest" / "bin" / "python"
FOLDER = Path(__file__).parent / "checkpoint_cases"
CASES = [
    (path.name, node.name)
    for path in sorted(FOLDER.glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]
WITH_REAL_BROKER = {"kills.py"}
pytestmark = pytest.mark.guest


@pytest.fixture(scope="module")
def outcomes() -> "Iterator[Outcomes]":
    place = Path(tempfile.mkdtemp(prefix="ilc", dir="/tmp"))
    (place / "guest").mkdir()
    (place / "guest" / "interlock").symlink_to(ROOT / "interlock")
    runner = subprocess.Popen(
        [str(PYTHON), "-P", str(FOLDER / "running.py")], cwd=place, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={"PATH": "/usr/bin:/bin", "HOME": str(place), "TMPDIR": str(place), "OMP_NUM_THREADS": "1",
                        "PYTHONPATH": f"{place / 'guest'}:{FOLDER}"})
    try:
        yield Outcomes(runner, place)
    finally:
        runner.communicate(timeout=10)
        shutil.rmtree(place)


class Outcomes:
    """The errors of each file's cases; a file runs once, when its first case is asked for."""

    def __init__(self, runner: "subprocess.Popen[str]", place: Path) -> None:
        self._runner, self._place = runner, place
        self._found: dict[str, dict[str, str]] = {}

    def of(self, file: str, case: str) -> str:
        if file not in self._found:
            self._found[file] = self._run(file)
        return self._found[file].get(case, "the case did not run: " + self._found[file][""])

    def _run(self, file: str) -> dict[str, str]:
        place = self._place / file[:2]  # short: a socket lies below it
        place.mkdir()
        with (_real if file in WITH_REAL_BROKER else _stand_in)(place) as (path, run):
            told = {"file": str(FOLDER / file), "cwd": str(place), "environment": {
                "HOME": str(place), "TMPDIR": str(place), wire.SOCKET_ENV: path, leash.RUN_ENV: run}}
            assert self._runner.stdin is not None
            assert self._runner.stdout is not None
            self._runner.stdin.write(json.dumps(told) + "\n")
            self._runner.stdin.flush()
            status = self._runner.stdout.readline().strip()
        said, errors = ((place / name).read_text() for name in ("out.txt", "err.txt"))
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        return {**{r["case"]: r["error"] and r["error"] + errors[-4000:] for r in rows},
                "": f"{status} {errors[-4000:]}"}


@contextmanager
def _stand_in(place: Path) -> Iterator[tuple[str, str]]:
    found = StandIn(place)
    try:
        yield found.path, RUN
    finally:
        found.end()


@contextmanager
def _real(place: Path) -> Iterator[tuple[str, str]]:
    """The broker as a node runs it, in this process. Its guests run as we do, so the peer's uid is told it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broker, "peer_uid", lambda _: UID)
        door = Door(place).ready()
        try:
            yield str(place / "run_1" / "guest.sock"), "run_1"
            assert len(door.staged()) <= 1  # the last one that was killed; what begins next drops it
        finally:
            door.close()


def test_the_guest_environment_is_there() -> None:
    assert os.access(PYTHON, os.X_OK), "make setup builds .venv-guest"


@pytest.mark.parametrize(("file", "case"), CASES, ids=[f"{f[:-3]}-{c[5:]}" for f, c in CASES])
def test_case(outcomes: Outcomes, file: str, case: str) -> None:
    assert not outcomes.of(file, case), outcomes.of(file, case)
