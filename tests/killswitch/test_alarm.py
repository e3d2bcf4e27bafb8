"""The command hook."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from interlock.errors import Malformed, Untrusted
from killswitch import alarm
from killswitch.verify import state_of
from tests.killswitch.conftest import need_root
from tests.killswitch.host import wait_for


def test_takes_the_command_line_or_the_settings_file(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    assert alarm.command(None, settings) == []
    settings.write_text(json.dumps({"on_unconfirmed": ["/bin/page", "it; rm"]}))
    settings.chmod(0o600)
    assert alarm.command(None, settings) == ["/bin/page", "it; rm"]
    assert alarm.command("/bin/page 'a b'", settings) == ["/bin/page", "a b"]


def test_refuses_when_the_settings_are_off_or_others_can_write_them(tmp_path: Path) -> None:
    settings = tmp_path / "settings.json"
    for text in ("{", "[]", '{"on_unconfirmed": "/bin/page"}'):
        settings.write_text(text)
        settings.chmod(0o600)
        with pytest.raises(Malformed):
            alarm.command(None, settings)
    settings.write_text("{}")
    assert alarm.command(None, settings) == []
    settings.chmod(0o622)
    with pytest.raises(Untrusted):
        alarm.command(None, settings)


@pytest.mark.root
def test_the_hook_does_not_inherit_the_supervisors_protection(tmp_path: Path) -> None:
    need_root()
    told = tmp_path / "told"
    code = (
        "import os; "
        f"open({str(told)!r}, 'w').write(open('/proc/self/oom_score_adj').read().strip() + ' ' + str(os.nice(0)))"
    )
    call = (
        "import os, sys, time; from killswitch import alarm; "
        # Not every host lets root lower it, so any value but the ordinary one stands for the protection here.
        "open('/proc/self/oom_score_adj', 'w').write('300'); os.setpriority(os.PRIO_PROCESS, 0, -5); "
        "alarm.call_out([sys.executable, '-I', '-S', '-c', sys.argv[1]], {}); time.sleep(1); "
        "print(open('/proc/self/oom_score_adj').read().strip(), os.nice(0))"
    )
    done = subprocess.run([sys.executable, "-c", call, code], capture_output=True, text=True, timeout=20, check=True)
    assert done.stdout.strip() == "300 -5"  # control: the caller keeps its own
    assert told.read_text() == "0 0"


def test_what_a_hook_that_hangs_started_dies_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alarm, "LIMIT_S", 1.0)
    pid_file = tmp_path / "pid"
    alarm.call_out(["/bin/sh", "-c", f"sleep 60 & echo $! > {pid_file}; wait"], {})
    wait_for(lambda: pid_file.exists() and pid_file.read_text().strip() != "")
    child = int(pid_file.read_text())
    assert state_of(child) in ("R", "S", "D"), "alive before"
    wait_for(lambda: state_of(child) in ("", "Z"))


def test_a_hook_that_fails_or_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(alarm, "LIMIT_S", 1.0)
    told = tmp_path / "told"
    code = f"import sys; open({str(told)!r}, 'w').write(sys.stdin.read())"
    for argv in ([], ["/does/not/exist"], [sys.executable, "-c", "import time; time.sleep(30)"]):
        alarm.call_out(argv, {"order": "stop_1"})
    alarm.call_out([sys.executable, "-I", "-S", "-c", code], {"order": "stop_1"})
    wait_for(lambda: told.exists() and told.read_text() != "")
    assert json.loads(told.read_text()) == {"order": "stop_1"}
    seen: list[str] = []

    def both_failed() -> bool:
        seen.append(capfd.readouterr().err)
        return "".join(seen).count("hook_failed") == 2

    wait_for(both_failed)
    assert "".join(seen).count('"alarm": "not_confirmed"') == 4
