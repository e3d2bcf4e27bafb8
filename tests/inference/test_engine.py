"""The engine with real models: cases in one process of the guest environment, and the program as a run starts it."""

import ast
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Malformed
from interlock.terms import FULL, PROFILES
from runners.inference import engine
from runners.inference.frames import Complete
from tests.guest.stand_in_broker import RUN, StandIn
from tests.inference.stand_in import Script
from tests.inference.switchboard import Switchboard, text

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-guest" / "bin" / "python"
RUNNER = ROOT / "tests" / "guest" / "checkpoint_cases" / "running.py"
FILE = Path(__file__).parent / "engine_cases" / "in_process.py"
CASES = [
    node.name for node in ast.parse(FILE.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
]


class Broker(StandIn):
    """The stand-in that also says how the run is."""

    def _status(self) -> dict[str, Any]:
        return {"run": RUN, "attempt": 1, "state": "live", "steps": 0}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e")


@pytest.fixture(scope="module")
def broker(place: Path) -> Iterator[Broker]:
    folder = place / "b"
    folder.mkdir()
    found = Broker(folder)
    yield found
    found.end()


def environment(place: Path, broker: StandIn, **more: str) -> dict[str, str]:
    return {
        "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(place),
        "HOME": str(place), "INTERLOCK_SOCKET": broker.path, "INTERLOCK_RUN": RUN, "ENGINE_CASES_FOLDER": str(place),
        "PYTHONDONTWRITEBYTECODE": "1", **more,
    }


@pytest.fixture(scope="module")
def outcomes(place: Path, broker: Broker) -> dict[str, str]:
    told = environment(place, broker)
    done = subprocess.run(
        [PYTHON, RUNNER, FILE], env=told, capture_output=True, text=True, timeout=150, check=False,
    )
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"case"')]
    return {"": done.stderr[-4000:], **{row["case"]: row["error"] for row in rows}}


@pytest.mark.guest
@pytest.mark.parametrize("case", CASES)
def test_in_the_guest_environment(outcomes: dict[str, str], case: str) -> None:
    assert outcomes.get(case, "the case did not run: " + outcomes[""]) == ""


@pytest.mark.guest
def test_the_program_loads_serves_and_ends_by_a_stop(place: Path, broker: Broker, outcomes: dict[str, str]) -> None:
    assert outcomes, "the versions are saved by the cases"
    version = json.loads((place / "digests.json").read_text())["text"]
    path, folder = str(place / "engine.sock"), place / "t"
    folder.mkdir()
    # as a sandbox shows it: the guest library, and of `runners` this folder alone
    (place / "guest").mkdir()
    (place / "guest" / "interlock").symlink_to(ROOT / "interlock")
    (place / "room" / "runners").mkdir(parents=True)
    (place / "room" / "runners" / "inference").symlink_to(ROOT / "runners" / "inference")
    told = environment(folder, broker, INTERLOCK_ENGINE_SOCKET=path, INTERLOCK_ATTEMPT="2",
                       PYTHONPATH=f"{place / 'guest'}:{place / 'room'}")
    with Switchboard(path) as board:
        command = [PYTHON, "-P", "-m", "runners.inference.engine", "--version", version, "--name", "luna"]
        program = subprocess.Popen(
            command, env=told, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        try:
            found = board.call(Complete("c", PROFILES[FULL], prompt="the canary", max_tokens=9, seed=1).as_json())
            assert found[-1]["done"]["completion_tokens"] == 9
            assert board.hellos[0]["hello"] == {
                "run": RUN, "attempt": 2, "version": version, "kind": "text", "context": 512, "name": "luna",
            }
            # no plaintext weight file: nothing but its own caches was ever written where it may write
            assert [p for p in folder.rglob("*") if p.is_file() and p.stat().st_size > 1000] == []
            broker.stopped = True
            out, err = program.communicate(timeout=10)
        finally:
            broker.stopped = False
            if program.poll() is None:
                program.send_signal(signal.SIGKILL)
                program.wait()
    assert (program.returncode, err) == (engine.TOLD, "")
    assert json.loads(out)["ready"] == "engine"
    assert "canary" not in out + err
    assert text(found) not in out + err


# --- the program's own part, without torch ------------------------------------------------------------


class Line:
    silent_ms = 0


class Model(Script):
    context = 9

    def start(self) -> None:
        """Begin."""

    def stop(self) -> None:
        """End."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "TURN_S", 0.01)
    monkeypatch.setattr(engine, "told_to_end", lambda: False)


@pytest.mark.usefixtures("quick")
def test_an_engine_ends_when_no_gateway_is_there() -> None:
    line, ending, ended = Line(), threading.Event(), []
    waiting = threading.Thread(target=lambda: ended.append(engine.watch(Model(), line, ending)))
    waiting.start()
    time.sleep(0.1)
    line.silent_ms = engine.ALONE_MS
    time.sleep(0.1)
    assert ended == []
    line.silent_ms = engine.ALONE_MS + 1
    waiting.join(2)
    ending.set()
    assert ended == [engine.ALONE]


@pytest.mark.usefixtures("quick")
def test_an_engine_ends_when_it_is_told_or_broken(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    ending = threading.Event()
    ending.set()
    assert engine.watch(Model(), Line(), ending) == engine.TOLD
    assert engine.watch(Model(alive=False), Line(), threading.Event()) == engine.BROKEN
    assert "unavailable.engine" in capfd.readouterr().err
    monkeypatch.setattr(engine, "told_to_end", lambda: True)
    assert engine.watch(Model(), Line(), threading.Event()) == engine.TOLD


def test_only_a_stop_is_a_reason_to_end(place: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker) -> None:
    monkeypatch.setenv("INTERLOCK_SOCKET", str(place / "nobody"))
    assert not engine.told_to_end()
    monkeypatch.setenv("INTERLOCK_SOCKET", broker.path)
    assert not engine.told_to_end()
    broker.stopped = True
    try:
        assert engine.told_to_end()
    finally:
        broker.stopped = False


def test_a_model_that_makes_no_token_is_never_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "WARM_S", 0.2)
    engine.warm_up("text", Model())
    with pytest.raises(Malformed):
        engine.warm_up("text", Model(think_s=5.0))


def test_an_engine_outside_a_run_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    words = engine.argparse.Namespace(version="sha256:0", name="luna")
    monkeypatch.setenv("INTERLOCK_RUN", "run_1")
    monkeypatch.setenv("INTERLOCK_ATTEMPT", "3")
    assert engine._hello(words, "text", 9).attempt == 3
    for name in ("INTERLOCK_RUN", "INTERLOCK_ATTEMPT"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "")
            with pytest.raises(Malformed):
                engine._hello(words, "text", 9)
