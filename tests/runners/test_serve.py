"""Starting and ending the program: one clear refusal each, nothing half done."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interlock.errors import Unavailable, Usage
from killswitch.client import Supervisor
from runners.broker_line import broker_ids
from runners.folders import folders
from runners.relay import carry
from runners.run_uid import uid_range
from runners.upstream import Upstream
from tests.runners import programs
from tests.runners.conftest import needs_root
from tests.runners.programs import BROKER_UID, Lab


def _serve(*words: str, isolated: bool = True, uid: int = 0) -> dict[str, str]:
    """Run `runners serve` to its end and return the error that it printed."""
    flags = ["-I"] if isolated else []
    done = subprocess.run([sys.executable, *flags, "-m", "runners", "serve", "--broker-user", BROKER_UID, *words],
                          capture_output=True, cwd=str(Path(__file__).parents[2]), user=uid or None, timeout=60)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert done.stdout == b""
    error: dict[str, str] = json.loads(done.stderr.splitlines()[-1])["error"]
    assert error["next_step"]
    return error


@needs_root
def test_refuses_when_the_host_has_not_joined(short):
    assert _serve("--state", str(short / "s"), "--runtime", str(short / "r"))["code"] == "not_found.node"


@needs_root
def test_refuses_when_the_join_broke_off(joined):
    (joined.node / "node.pem").unlink()
    assert _serve("--state", str(joined.state), "--runtime", str(joined.runtime))["code"] == "conflict.half_made"


@needs_root
def test_refuses_when_the_supervisor_is_away(joined):
    joined.runtime.mkdir()
    words = ("--state", str(joined.state), "--runtime", str(joined.runtime))
    assert _serve(*words)["code"] == "unavailable.supervisor"


@needs_root
def test_refuses_when_the_broker_user_is_unknown_or_root(joined):
    words = ("--state", str(joined.state), "--runtime", str(joined.runtime))
    assert _serve(*words, "--broker-user", "no-such-user")["code"] == "unavailable.broker_user"
    with pytest.raises(Unavailable):
        broker_ids("root")
    with pytest.raises(Unavailable):
        broker_ids("0")
    assert broker_ids(BROKER_UID) == (int(BROKER_UID), int(BROKER_UID))


def test_refuses_when_not_isolated(short):
    error = _serve("--state", str(short), isolated=False)
    assert error["code"] == "untrusted.origin"


def test_refuses_when_not_root(short, monkeypatch):
    from runners.folders import require_root

    monkeypatch.setattr("runners.folders.os.geteuid", lambda: 1000)
    with pytest.raises(Unavailable) as refusal:
        require_root()
    assert refusal.value.code == "unavailable.root"


@needs_root
def test_refuses_when_a_data_root_is_missing(joined):
    words = ("--state", str(joined.state), "--runtime", str(joined.runtime), "--data-root", "/no/such/folder")
    assert _serve(*words)["code"] == "unavailable.data_root"


def test_refuses_when_a_socket_path_would_be_too_long(short):
    with pytest.raises(Usage) as refusal:
        folders(str(short), "/tmp/" + "x" * 60)
    assert refusal.value.code == "usage.path"
    assert folders(str(short), "/tmp/x").runtime == Path("/tmp/x")


def test_refuses_when_the_uid_range_is_outside_that_of_runs():
    assert uid_range("60200-60299") == (60200, 60299)
    for words in ("0-60999", "60999-60100", "60100", "a-b", "1000-2000"):
        with pytest.raises(Usage):
            uid_range(words)


@pytest.mark.root
@needs_root
def test_refuses_a_second_start_and_ends_cleanly(own_lab: Lab):
    words = ("--state", str(own_lab.host.state), "--runtime", str(own_lab.host.runtime))
    assert _serve(*words)["code"] == "conflict.running"
    made = own_lab.launch("sh", "-c", "trap '' TERM; echo up; sleep 1000")
    own_lab.live(made)
    assert own_lab.node is not None
    assert own_lab.node.end(signal.SIGTERM) == 0
    assert own_lab.over(made)["state"] == "ended"  # told before the program went
    assert not Path(f"/proc/{own_lab.node.ready['broker_pid']}").exists()
    closed = own_lab.site.wait_for(lambda: [e for e in own_lab.site.events() if e["type"] == "stream.closed"])
    assert len(closed) == 2  # launcher and broker
    assert not list((own_lab.host.runtime / "runs").iterdir())


@pytest.mark.root
@needs_root
def test_the_node_carries_heartbeats_when_the_supervisors_own_link_is_down(joined, site):
    upstream = Upstream(joined)
    link = joined.node / "link.json"
    value = link.read_text()
    link.write_text(json.dumps({**json.loads(value), "url": "https://localhost:1"}))
    program = programs.supervisor(joined)  # its own link reaches nobody
    try:
        client = Supervisor(joined.socket)
        assert client.ask("status")["complete"] is False
        assert carry(client, upstream) is True
        assert client.ask("status")["complete"] is True  # the answer was taken
        assert len(site.beats) == 1
        link.write_text(value)
        until = time.monotonic() + 10
        while not client.ask("status")["link"]["connected"]:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert carry(client, upstream) is False  # control: no second path beside a first one
    finally:
        program.end()
        upstream.close()
