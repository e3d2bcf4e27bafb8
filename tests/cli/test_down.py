"""`down` removes exactly what is its own: groups by the supervisor's note, mounts below RUNTIME, known files."""

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cli import down
from control_plane.cli.command import execute
from control_plane.cli.programs import Places
from control_plane.cli.terminal import Terminal
from interlock.errors import Malformed
from sandbox.cgroup import Limits, Tree, own_tree

NOT_ROOT = os.geteuid() != 0


@pytest.fixture
def places() -> Iterator[Places]:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        found = Places.of(Path(folder) / "state", Path(folder) / "run")
        (found.state / "supervisor").mkdir(parents=True)
        found.runtime.mkdir()
        yield found


def _note(places: Places, paths: object) -> None:
    (places.state / "supervisor" / "tree.json").write_text(json.dumps({"paths": paths}))


def test_down_is_idempotent(places: Places) -> None:
    for name in ("supervisor.sock", "supervisor.lock"):
        (places.runtime / name).touch()
    (places.runtime / "runs" / "r.1").mkdir(parents=True)
    (places.runtime / "somebody-elses").touch()
    first = down.take_down(places, Terminal(True))
    assert (first["groups"], first["mounts"], first["files"]) == (0, 0, 3)
    assert [p.name for p in places.runtime.iterdir()] == ["somebody-elses"]
    (places.runtime / "somebody-elses").unlink()
    assert down.take_down(places, Terminal(True))["files"] == 0
    assert not places.runtime.exists()
    assert down.take_down(places, Terminal(True))["files"] == 0
    assert {p["how"] for p in first["programs"]} == {"was not running"}


def test_a_state_that_is_not_there_is_said_and_not_made(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A mistyped --state must not look like a site that was ended."""
    nowhere = tmp_path / "s"
    assert execute(["down", "--state", str(nowhere)]) == 0
    assert "there is no site in" in capfd.readouterr().err
    assert execute(["--json", "bootstrap", "--state", str(nowhere)]) == 1
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["code"] == "not_found.site"
    assert "interlock up" in error["next_step"]
    assert not nowhere.exists()


@pytest.mark.parametrize("paths", [
    {}, "x", {"unified": "/sys/fs/cgroup/user.slice"}, {"unified": "relative/interlock-1"},
    {"unified": "/sys/fs/cgroup/interlock-1", "pids": "/sys/fs/cgroup/pids/interlock-2"}])
def test_refuses_when_the_note_names_groups_that_are_not_ours(places: Places, paths: object) -> None:
    _note(places, paths)
    with pytest.raises(Malformed):
        down.noted_tree(places)
    _note(places, {"unified": "/a/interlock-1", "pids": "/b/interlock-1"})
    assert down.noted_tree(places) == Tree("interlock-1", {"unified": "/a", "pids": "/b"})


def test_refuses_when_something_is_still_mounted(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that holds a mount is never cleared: it might be somebody's data."""
    precious = places.runtime / "runs" / "r.1" / "data"
    precious.mkdir(parents=True)
    (precious / "file").write_text("x")
    monkeypatch.setattr(down, "mounts_below", lambda *_: [str(precious)])
    down.clear_files(places)
    assert (precious / "file").exists()
    monkeypatch.undo()
    down.clear_files(places)
    assert not precious.exists()


def test_a_link_is_not_followed(places: Places, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    (places.runtime / "runs").symlink_to(tmp_path)
    down.clear_files(places)
    assert (tmp_path / "precious").exists()


def test_mount_points_are_read_with_their_spaces(places: Places) -> None:
    found = places.state / "mountinfo"
    real = os.path.realpath(places.runtime)
    found.write_text(f"1 2 0:1 / {real}/runs/a\\040b rw - tmpfs t rw\n2 2 0:1 / {real}/runs/a\\040b/c rw - tmpfs t rw\n"
                     f"3 2 0:1 / {real}x/no rw - tmpfs t rw\n")
    assert down.mounts_below(places.runtime, found) == [f"{real}/runs/a b/c", f"{real}/runs/a b"]


@pytest.mark.root
@pytest.mark.skipif(NOT_ROOT, reason="mounts need root")
def test_left_over_mounts_are_unmounted_and_what_lies_outside_stays(places: Places, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    inside = places.runtime / "runs" / "r.1" / "data"
    inside.mkdir(parents=True)
    subprocess.run(["mount", "--bind", tmp_path, inside], check=True)
    try:
        report = down.take_down(places, Terminal(True))
    finally:
        subprocess.run(["umount", inside], check=False, capture_output=True)
    assert report["mounts"] == 1
    assert (tmp_path / "precious").exists()
    assert not places.runtime.exists()


@pytest.mark.root
@pytest.mark.skipif(NOT_ROOT, reason="control groups need root")
def test_left_over_groups_are_killed_and_removed(places: Places) -> None:
    tree = own_tree(f"interlock-down-{os.getpid()}")
    group = tree.create("run_x.1", Limits(pids=16, memory_mb=64))
    with subprocess.Popen(["sleep", "60"]) as process:
        for file in group.procs_files():
            Path(file).write_text(str(process.pid))
        _note(places, tree.paths)
        assert down.take_down(places, Terminal(True))["groups"] == 1
        assert process.wait(5) == -9
    assert not group.exists()
    assert not Path(tree.paths["unified"]).exists()
