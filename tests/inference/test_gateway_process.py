"""The gateway as the launcher starts it: a user of its own, engines by control socket, an end with the launcher."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from interlock.call import Action
from interlock.errors import Malformed, Unavailable, Untrusted
from interlock.order import Labels, LaunchOrder
from interlock.permit import Permit, boottime_ms, issue
from interlock.plan import Plan
from interlock.tier import Tier
from killswitch.page import StopPageWriter
from killswitch.state import StopState
from runners import gateway_line, gateway_process, inherited
from runners.folders import Folders
from runners.gateway_line import GatewayLine
from tests.inference.gateway_room import wait_for
from tests.inference.stand_in import VERSION
from tests.runners.conftest import needs_root

pytestmark = [pytest.mark.root, needs_root]
USER, RUN_UID, OTHER_UID = 61_990, 61_991, 61_992  # none that a run of this host has


def order(**more: object) -> LaunchOrder:
    plan = Plan(("engine",), Tier.NONE, "lab", model="luna", **{"weights": (VERSION,), "serve": True, **more})  # type: ignore[arg-type]
    labels = Labels("lab", "rae", "rae", "run_1", "node-1", Tier.NONE, "luna")
    return LaunchOrder("order_1234", "run_1", 1, labels, plan, 0, 60_000, 60_000, {})


def permit() -> Permit:
    return issue(call="c", action=Action.SERVE, resource="model/luna", run="run_1", epoch=0, record="r",
                 expires_ms=boottime_ms() + 5_000)


def doorway(folder: Path, uid: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "engine.sock"))
    os.chown(folder / "engine.sock", uid, uid)
    os.chmod(folder / "engine.sock", 0o600)
    listener.listen(32)
    return listener


class Host:
    """Folders of a node whose supervisor writes the stop page, and a gateway."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.found = Folders(folder / "s", folder / "r")
        for each in (self.found.shared, self.found.runtime):
            each.mkdir(parents=True, mode=0o755)
        self.page = StopPageWriter(self.found.page, self.found.stop_state)
        self.write()
        self.line = GatewayLine(self.found, "node-1", str(USER), 0)

    def write(self) -> None:
        self.page.write(StopState())

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"http://127.0.0.1:{self.line.port}{path}", trust_env=False, verify=False)

    def engine(self, uid: int) -> "subprocess.Popen[bytes]":
        """Start a stand-in under `uid`."""
        code = ("import os, sys; os.setgid(int(sys.argv[1])); os.setuid(int(sys.argv[1]));"
                "sys.argv = ['x', sys.argv[2], '--run', 'run_1']; from tests.inference.stand_in import main; main()")
        return subprocess.Popen([sys.executable, "-c", code, str(uid), str(self.folder / "engine.sock")],
                                cwd=Path(__file__).parents[2], stderr=subprocess.DEVNULL)

    def recorded(self) -> bytes:
        return b"".join(p.read_bytes() for p in self.found.gateway_spool.rglob("*.seg"))


@pytest.fixture
def host() -> Iterator[Host]:
    folder = Path(tempfile.mkdtemp(prefix="ilp", dir="/tmp"))
    folder.chmod(0o755)
    found = Host(folder)
    try:
        yield found
    finally:
        found.line.end()
        assert not found.line.alive
        shutil.rmtree(folder)


def test_a_gateway_that_hangs_is_killed_so_that_it_is_started_again(host: Host) -> None:
    assert host.line.engines() == []  # control
    host.line._program._control.settimeout(0.3)
    os.kill(host.line.pid, signal.SIGSTOP)
    begun = time.monotonic()
    with pytest.raises(Unavailable):
        host.line.engines()
    assert time.monotonic() - begun < 3
    assert not host.line.alive


def test_serves_under_its_own_user_and_ends_with_the_launcher(host: Host) -> None:
    status = Path(f"/proc/{host.line.pid}/status").read_text()
    assert f"Uid:\t{USER}\t{USER}\t{USER}" in status
    assert "NoNewPrivs:\t1" in status
    assert host.get("/healthz").json() == {"ok": True}
    assert host.get("/v1/models").json()["error"]["code"] == "stale.entitlements"  # nobody shared any
    words = Path(f"/proc/{host.line.pid}/cmdline").read_bytes() + Path(f"/proc/{host.line.pid}/environ").read_bytes()
    assert host.line._program.key.hex().encode() not in words
    begun = time.monotonic()
    host.line.end()
    assert time.monotonic() - begun < 3
    assert b"stream.closed" in host.recorded()
    assert (host.found.gateway_spool.stat().st_uid, host.found.gateway_spool.stat().st_mode & 0o777) == (USER, 0o700)
    with pytest.raises(Unavailable):
        host.line.engines()
    host.line.close("run_1", 1)  # a gateway that is gone is no error


def test_an_engine_dials_and_another_uid_is_an_incident(host: Host) -> None:
    with doorway(host.folder, RUN_UID) as listener:
        host.write()
        host.line.open(order(), permit(), RUN_UID, listener)
    assert host.line.engines() == [{"run": "run_1", "attempt": 1, "ready": False, "error": ""}]
    (host.folder / "engine.sock").chmod(0o666)  # even then: it is the peer's uid that counts
    stranger = host.engine(OTHER_UID)
    try:
        wait_for(lambda: host.line.engines()[0]["error"] == "untrusted.peer")
    finally:
        stranger.kill()
        stranger.wait()
    assert host.line.engines()[0]["ready"] is False
    (host.folder / "engine.sock").chmod(0o600)
    own = host.engine(RUN_UID)
    try:
        wait_for(lambda: host.line.engines()[0]["ready"])  # control
        assert host.line.engines()[0]["error"] == ""
    finally:
        own.kill()
        own.wait()
    host.line.close("run_1", 1)
    assert host.line.engines() == []
    assert b"untrusted.peer" in host.recorded()


def test_opens_nothing_but_a_plan_to_serve_one_version_under_a_permit(host: Host) -> None:
    with doorway(host.folder, RUN_UID) as listener:
        for wrong in ({"serve": False}, {"weights": ()}, {"weights": (VERSION, "sha256:" + "00" * 32)}):
            with pytest.raises(Malformed):
                host.line.open(order(**wrong), permit(), RUN_UID, listener)
        host.write()
        other = issue(call="c", action=Action.SERVE, resource="model/luna", run="run_2", epoch=0, record="r",
                      expires_ms=boottime_ms() + 5_000)
        with pytest.raises(Untrusted):
            host.line.open(order(), other, RUN_UID, listener)
        host.line.open(order(), permit(), RUN_UID, listener)  # control


def test_its_memory_is_closed(host: Host) -> None:
    rows = Path(f"/proc/{host.line.pid}/limits").read_text().splitlines()
    assert next(r.split()[4:6] for r in rows if r.startswith("Max core file")) == ["0", "0"]
    with subprocess.Popen(["/usr/bin/sleep", "20"], user=USER, group=USER) as other:
        try:
            wait_for(lambda: _readable(other.pid))  # control: an open process of that uid can be looked into
            assert not _readable(host.line.pid)
        finally:
            other.kill()


def _readable(pid: int) -> bool:
    """Return whether another process of the gateway's uid may read the memory map of `pid`."""
    done = subprocess.run(["/usr/bin/head", "-c", "1", f"/proc/{pid}/maps"], user=USER, group=USER,
                          capture_output=True, check=False)
    return done.stdout != b""


def test_a_permit_key_of_another_size_is_refused() -> None:
    def read(key: bytes) -> bytes:
        read_end, write_end = os.pipe()
        os.write(write_end, key)
        os.close(write_end)
        return inherited.read_key(read_end)

    assert read(b"k" * 32) == b"k" * 32  # control
    for size in (0, 31, 33):
        with pytest.raises(Untrusted):
            read(bytes(size))


def test_never_as_root_and_a_port_in_use_is_a_refusal() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, pytest.raises(Untrusted) as refused:
        inherited.open_control(theirs.detach(), "gateway")
    assert refused.value.code == "untrusted.uid"
    with gateway_process.bind(0) as taken, pytest.raises(Unavailable) as used:
        gateway_process.bind(taken.getsockname()[1])
    assert used.value.code == "unavailable.port"
    with pytest.raises(Unavailable) as nobody:
        gateway_line.gateway_ids("no-such-user")
    assert nobody.value.code == "unavailable.gateway_user"
    assert gateway_line.gateway_ids("61990") == (61_990, 61_990)
