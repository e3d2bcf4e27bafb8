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
def outcomes() -> "Outcomes":
    return Outcomes({})


class Outcomes(dict[str, dict[str, str]]):
    """The errors of each file's cases; a file runs once, when its first case is asked for."""

    def of(self, file: str, case: str) -> str:
        if file not in self:
            self[file] = _run(file)
        return self[file].get(case, "the case did not run: " + self[file][""])


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


def _run(file: str) -> dict[str, str]:
    place = Path(tempfile.mkdtemp(prefix="ilc", dir="/tmp"))
    (place / "guest").mkdir()
    (place / "guest" / "interlock").symlink_to(ROOT / "interlock")
    try:
        with (_real if file in WITH_REAL_BROKER else _stand_in)(place) as (path, run):
            return _outcomes(file, place, {wire.SOCKET_ENV: path, leash.RUN_ENV: run})
    finally:
        shutil.rmtree(place)


def _outcomes(file: str, place: Path, told: dict[str, str]) -> dict[str, str]:
    done = subprocess.run(
        [str(PYTHON), "-P", str(FOLDER / "running.py"), str(FOLDER / file)], cwd=place, capture_output=True,
        text=True, timeout=150, env={
            "PATH": "/usr/bin:/bin", "HOME": str(place), "TMPDIR": str(place), "OMP_NUM_THREADS": "1",
            "PYTHONPATH": f"{place / 'guest'}:{FOLDER}", **told,
        },
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    errors = {row["case"]: row["error"] and row["error"] + done.stderr[-4000:] for row in found}
    return {**errors, "": f"{done.returncode} {done.stderr[-4000:]}"}


def test_the_guest_environment_is_there() -> None:
    assert os.access(PYTHON, os.X_OK), "make setup builds .venv-guest"


@pytest.mark.parametrize(("file", "case"), CASES, ids=[f"{f[:-3]}-{c[5:]}" for f, c in CASES])
def test_case(outcomes: Outcomes, file: str, case: str) -> None:
    assert not outcomes.of(file, case), outcomes.of(file, case)
