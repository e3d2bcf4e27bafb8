"""Programs are started until they say that they are ready, and ended by pidfd, never by a reused number."""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cli import programs
from control_plane.cli.programs import Places, Program
from interlock.errors import Conflict, Unavailable, Usage

READY = ("import json, os, time; print(json.dumps({'ready': 'runners', 'pid': os.getpid(), 'node': 'n'}), flush=True); "
         "time.sleep(60)")


@pytest.fixture
def places() -> Iterator[Places]:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        found = Places.of(Path(folder) / "state", Path(folder) / "run")
        found.state.mkdir()
        found.runtime.mkdir()
        yield found


def _python(words: str) -> list[str]:
    return [sys.executable, "-I", "-c", words]


def test_a_program_is_ready_when_it_says_so_and_ends_by_signal(places: Places) -> None:
    found = programs.launch(places, "runners", _python(READY))
    assert found.facts["node"] == "n"
    assert programs.running(places, "runners") == found
    assert places.log("runners").stat().st_mode & 0o777 == 0o600
    assert programs.end(found) == "ended"
    assert programs.running(places, "runners") is None
    assert programs.end(found) == "gone"


def test_a_program_that_ignores_sigterm_is_killed(places: Places) -> None:
    found = programs.launch(places, "runners", _python("import signal; signal.signal(15, signal.SIG_IGN); " + READY))
    started = time.monotonic()
    assert programs.end(found, wait_s=0.3) == "killed"
    assert time.monotonic() - started < 5
    assert not found.lives


def test_the_environment_of_a_program_is_clean(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INTERLOCK_CODE", "123456")
    monkeypatch.setenv("PYTHONPATH", "/tmp/x")
    words = READY.replace("'node': 'n'", "'env': sorted(os.environ)")
    found = programs.launch(places, "runners", _python(words))
    programs.end(found)
    assert set(found.facts["env"]) - {"LC_CTYPE"} == {"HOME", "LANG", "PATH"}


def test_refuses_when_a_program_refuses(places: Places) -> None:
    refusal = {"error": {"code": "conflict.running", "message": "one runs", "next_step": "down", "details": {}}}
    with pytest.raises(Conflict, match="one runs"):
        programs.launch(places, "runners", _python(
            f"import sys; print({json.dumps(refusal)!r}, file=sys.stderr); sys.exit(1)"))
    assert not places.pid_file("runners").exists()


def test_refuses_when_a_program_ends_or_stays_silent(places: Places) -> None:
    with pytest.raises(Unavailable) as ended:
        programs.launch(places, "runners", _python("print('oops')"))
    assert "oops" in ended.value.details["tail"]
    before = time.monotonic()
    with pytest.raises(Unavailable, match="not ready"):
        programs.launch(places, "runners", _python("import time; time.sleep(30)"), wait_s=0.5)
    assert time.monotonic() - before < 6


def test_refuses_when_the_ready_line_is_an_older_one(places: Places) -> None:
    """The log keeps what earlier starts said; only lines behind the start count."""
    programs.end(programs.launch(places, "runners", _python(READY)))
    with pytest.raises(Unavailable):
        programs.launch(places, "runners", _python("pass"))


def test_a_number_that_was_given_away_is_not_signalled(places: Places) -> None:
    """The pid file names a living process with another start time: it is not ours."""
    with_other_start = Program("runners", os.getpid(), (programs.start_time(os.getpid()) or 0) + 1)
    with_other_start.write(places)
    got: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda *_: got.append(1))
    try:
        assert programs.running(places, "runners") is None
        assert programs.end(with_other_start, wait_s=0.2) == "gone"
    finally:
        signal.signal(signal.SIGTERM, before)
    assert not got
    assert Program("x", os.getpid(), programs.start_time(os.getpid()) or 0).lives


def test_a_damaged_pid_file_names_nobody(places: Places) -> None:
    places.pid_file("runners").write_text("{")
    assert programs.running(places, "runners") is None


def test_refuses_when_the_socket_path_is_too_long() -> None:
    with pytest.raises(Usage) as found:
        Places.of(Path("/tmp") / ("x" * 90), None)
    assert found.value.code == "usage.path"
    assert Places.of(Path("/tmp/x"), None).runtime == Path("/tmp/x/run")


def test_a_local_command_passes_its_refusal_on() -> None:
    refusal = json.dumps({"error": {"code": "conflict.half_made", "message": "half", "next_step": "", "details": {}}})
    with pytest.raises(Conflict) as found:
        programs.ask(_python(f"import sys; print({refusal!r}, file=sys.stderr); sys.exit(1)"), what="init")
    assert found.value.code == "conflict.half_made"
    assert programs.ask(_python("print(7)"), what="x") == "7\n"
    with pytest.raises(Unavailable):
        programs.ask(_python("import sys; sys.exit(5)"), what="x")
