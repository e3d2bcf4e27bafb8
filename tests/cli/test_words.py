"""Global options, profiles, what is shown."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from control_plane.cli.command import execute
from control_plane.cli.invocation import hoist
from control_plane.cli.profile import Profile
from control_plane.cli.terminal import Terminal, clean, exit_status
from interlock.errors import (
    ApprovalRequired,
    Denied,
    Halted,
    LayerMissing,
    NotConfirmed,
    Refusal,
    Stale,
    Unavailable,
    Untrusted,
    Usage,
)


def test_global_options_stand_anywhere_before_the_command_of_a_run() -> None:
    assert hoist(["run", "--tier", "high", "--json", "--", "ls", "--json"]) == [
        "--json", "run", "--tier", "high", "--", "ls", "--json"]
    assert hoist(["runs", "--profile", "ada", "--url=http://localhost:1"]) == [
        "--profile", "ada", "--url=http://localhost:1", "runs"]
    assert hoist(["run", "--", "x", "--profile", "ada"]) == ["run", "--", "x", "--profile", "ada"]


@pytest.mark.parametrize(("refusal", "status"), [
    (Denied("x"), 1), (ApprovalRequired("x"), 1), (Halted("x"), 1), (Untrusted("x"), 1), (Usage("x"), 2),
    (Unavailable("x"), 3), (Stale("x"), 3), (LayerMissing("x"), 3), (NotConfirmed("x"), 4),
])
def test_exit_status_of_each_kind(refusal: Denied, status: int) -> None:
    assert exit_status(refusal) == status


def test_text_of_others_cannot_steer_the_terminal() -> None:
    hostile = "a\x1b[2Jb\u202ec\x9b1m\nd"
    shown = clean(hostile)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    assert "\x9b" not in shown
    assert "\n" not in shown
    assert clean("a\nb", keep="\n") == "a\nb"
    assert clean("größer 文字") == "größer 文字"


def test_refuses_when_others_can_read_the_credentials(interlock, remy: Profile, server) -> None:
    assert interlock("whoami")[0] == 0
    (remy.folder / "credentials.json").chmod(0o644)
    status, value, _ = interlock("whoami")
    assert (status, value["error"]["code"]) == (1, "untrusted.key_file_mode")
    assert "session-secret" not in json.dumps(value)


def test_credentials_are_private_and_replaced_whole(remy: Profile) -> None:
    remy.save({"url": "http://localhost:1", "session": "b"})
    assert [p.name for p in sorted(remy.folder.iterdir())] == ["credentials.json", "person.key"]
    assert {p.stat().st_mode & 0o777 for p in remy.folder.iterdir()} == {0o600}
    assert remy.folder.stat().st_mode & 0o777 == 0o700
    assert remy.load()["session"] == "b"


def test_refuses_when_a_profile_is_named_like_a_path(interlock) -> None:
    status, value, _ = interlock("--profile", "../../etc", "whoami")
    assert (status, value["error"]["code"]) == (2, "usage.profile")
    assert interlock("--profile", "ada", "whoami")[1]["error"]["code"] == "untrusted.session"


@pytest.mark.parametrize("words", [
    ["nonsense"], ["stop"], ["run", "ls"], ["runs", "--nope"], ["enrol", "http://localhost:1/x"], ["stop", "planet:x"],
])
def test_a_bad_command_line_is_one_object_with_a_code(interlock, words: list[str]) -> None:
    status, value, _ = interlock(*words)
    assert status in (1, 2)
    assert value["error"]["code"].partition(".")[0] in ("usage", "malformed")


def test_a_refusal_for_people_has_code_sentence_and_next_step(capfd: pytest.CaptureFixture[str], home: Path) -> None:
    assert execute(["whoami"]) == 1
    err = capfd.readouterr().err
    assert "[untrusted.session] you are not signed in" in err
    assert "next step: interlock login" in err


def test_every_kind_of_refusal_has_a_next_step(capfd: pytest.CaptureFixture[str]) -> None:
    """A sender that knows a better one is not overruled."""
    kinds = [Refusal]
    for kind in kinds:
        kinds += kind.__subclasses__()
    for kind in kinds:
        Terminal(True).refuse(kind("x"))
        assert json.loads(capfd.readouterr().out)["error"]["next_step"], kind
    Terminal(True).refuse(Denied("x", next_step="ask ada"))
    assert json.loads(capfd.readouterr().out)["error"]["next_step"] == "ask ada"


def test_the_command_isolates_itself_from_a_hostile_folder(tmp_path: Path) -> None:
    """A `policy.py` beside the user, in the current folder or on PYTHONPATH, must not become part of the command."""
    for name in ("policy", "audit", "sandbox", "httpx", "typer", "interlock"):
        (tmp_path / f"{name}.py").write_text("import os; os._exit(99)\n")
    command = Path(sys.executable).parent / "interlock"
    environ = {"PATH": os.environ["PATH"], "INTERLOCK_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([command, "--json", "whoami"], cwd=tmp_path, env=environ, capture_output=True, text=True,
                          check=False, timeout=30)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "untrusted.session"
    control = subprocess.run([sys.executable, "-c", "import policy"], cwd=tmp_path, env=environ, check=False)
    assert control.returncode == 99
