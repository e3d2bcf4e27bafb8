"""One rule for where a site lies: what one program makes, every other finds."""

from pathlib import Path

import pytest

from control_plane.cli.programs import Places
from interlock.places import SYSTEM_RUNTIME, SYSTEM_STATE, default_runtime, default_state, too_long
from runners.folders import folders


@pytest.mark.parametrize("root", [True, False])
def test_every_program_finds_the_same_site(root: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0 if root else 1000)
    monkeypatch.setenv("XDG_STATE_HOME", "/tmp/x")
    assert default_state() == (SYSTEM_STATE if root else Path("/tmp/x/interlock"))
    for state in (None, Path("/tmp/y"), SYSTEM_STATE):
        wanted = state or default_state()
        up, node = Places.of(state, None), folders(str(state) if state else None, None)
        assert (up.state, up.runtime) == (wanted, default_runtime(wanted))
        assert (node.state, node.runtime) == (wanted.resolve(), default_runtime(wanted).resolve())
        assert up.socket.resolve() == node.socket


def test_runtime_goes_with_the_state() -> None:
    assert default_runtime(SYSTEM_STATE) == SYSTEM_RUNTIME
    assert default_runtime(Path("/srv/site")) == Path("/srv/site/run")


def test_a_socket_path_is_measured_in_bytes() -> None:
    assert not too_long(Path("/" + "a" * 99))
    assert too_long(Path("/" + "a" * 100))
    assert too_long(Path("/" + "ä" * 60))
