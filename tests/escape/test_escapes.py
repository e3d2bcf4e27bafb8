"""The shared catalogue of escape attempts, in every shape of the sandbox, with the controls that run here.

`escapes.json` lies beside the checkout (shared/escapes) or where INTERLOCK_ESCAPES says; without it these
tests are skipped, visibly; the built-in probes of sandbox/probes.py are always there.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock.tier import Tier
from sandbox import probe
from sandbox.cgroup import Tree
from sandbox.profile import Mount, Profile
from sandbox.trial import put_down, trial
from tests.sandbox.conftest import MakeProfile

DEFAULT = Path(__file__).resolve().parents[3] / "shared/escapes/escapes.json"
FILE = Path(os.environ.get("INTERLOCK_ESCAPES", DEFAULT))
ESCAPES: dict[str, dict[str, Any]] = {e["id"]: e for e in json.loads(FILE.read_text())} if FILE.exists() else {}

ELSEWHERE = {
    "nt-05": "needs the egress proxy, which no profile has yet",
    "nt-10": "needs the egress proxy, which no profile has yet",
    "nt-02": "its control needs a metadata address on the host; judged inside all the same",
    "tt-01": "needs a terminal; no profile gives one (built-in probe terminal-input covers the ioctl)",
    "tt-02": "needs a terminal; no profile gives one (built-in probe terminal-input covers the ioctl)",
    "tt-04": "judged by console and export",
    "ln-01": "judged by the collector", "ln-02": "judged by the collector",
    "ln-04": "judged by the collector", "ln-05": "judged by the collector",
    "pt-04": "needs a helper outside", "rs-05": "judged by the launcher's log cap",
    "rs-07": "judged by the lease", "sv-04": "judged with a supervisor", "uk-04": "needs a compiler's helper",
    "uk-08": "judged at the gate", "su-04": "judged in test_the_effective_profile_is_what_the_kernel_says",
}
KILLED = ("uk-01", "uk-05", "uk-07", "uk-11")
SERIAL = ("rs-01", "rs-02", "rs-04", "rs-08", "rs-10")
CONTROLS: dict[str, tuple[str, ...]] = {
    "ks-01": ("filter",), "ks-04": ("filter",), "ns-01": ("filter", "userns_limit"),
    "ns-02": ("filter", "userns_limit"), "nt-01": ("network",),
    "nt-07": ("network",), "nt-08": ("network",), "ps-04": ("pid_namespace",), "ps-08": ("closed_descriptors",),
    "pt-02": ("filter",), "fs-10": ("masks",), "sv-02": ("pid_namespace",),
}
DRIVER = """\
import glob, json, os, signal, subprocess, sys
signal.signal(15, lambda *_: None)  # one attempt asks everybody to end; a handler is not inherited by exec
for path in sorted(glob.glob('/code/*.txt')):
    # close_fds=False: a descriptor that leaked into the sandbox must reach the probe as well
    p = subprocess.Popen([sys.executable, '-S', path], stdin=0, stdout=subprocess.PIPE, stderr=2, close_fds=False)
    try: out = p.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired: p.kill(); out = b'TIMEOUT'
    print('@' + json.dumps([os.path.basename(path)[:-4], p.returncode, out.decode(errors='replace')]), flush=True)
"""

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(not ESCAPES, reason=f"the shared catalogue is not at {FILE} (set INTERLOCK_ESCAPES)"),
]


def judged_inside() -> list[str]:
    skipped = set(ELSEWHERE) - {"nt-02"}
    return [i for i, e in ESCAPES.items() if e["judge"] != "host" and i not in skipped and i not in SERIAL]


def routable() -> str:
    """An address of this host that is not loopback; UDP connect sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe_socket:
        try:
            probe_socket.connect(("192.0.2.1", 9))
        except OSError:
            return ""
        return str(probe_socket.getsockname()[0])


@contextmanager
def fixtures(runtime: Path) -> Iterator[dict[str, str]]:
    canary = Path(f"/var/tmp/ilk-canary-{os.getpid()}")
    canary.write_text("known bytes")
    stand_in = subprocess.Popen(["/usr/bin/sleep", "120"], env={"ESC_SUPERVISOR": "1"})
    tcp = socket.create_server((routable() or "127.0.0.1", 0))
    control_plane = socket.socket(socket.AF_UNIX)
    control_plane.bind(str(runtime / "cp.sock"))
    os.chmod(runtime / "cp.sock", 0o777)
    control_plane.listen(1)
    address = "{}:{}".format(*tcp.getsockname())
    try:
        yield {
            "ESC_ARMED": "1", "ESC_WS": "/work", "ESC_CANARY": str(canary), "ESC_SUP_PID": str(stand_in.pid),
            "ESC_SUP_SET": "1", "ESC_HOST_PIDNS": os.readlink("/proc/self/ns/pid"), "ESC_OUT_TCP": address,
            "ESC_CP": address, "ESC_RESOLVERS": address.split(":")[0], "ESC_CPSOCK": str(runtime / "cp.sock"),
            "ESC_LINK_TARGET": "/usr/bin/true", "ESC_PIDS": "32", "ESC_MEM_MB": "128", "ESC_DISK_MB": "8",
            "ESC_INODES": str(1024 + 8 * 64), "ESC_NOFILE": "1024", "ESC_LIVE_S": "4",
        }
        assert stand_in.poll() is None, "the stand-in for the supervisor is alive afterwards"
    finally:
        stand_in.kill()
        stand_in.wait()
        tcp.close()
        control_plane.close()
        canary.unlink()


def limits() -> dict[str, int]:
    return {"pids": 32, "memory_mb": 128, "work_mb": 8, "cpu_seconds": 20}


def with_code(profile: Profile, runtime: Path, ids: list[str]) -> Profile:
    folder = runtime / "code"
    folder.mkdir(mode=0o755)
    for id_ in ids:
        (folder / f"{id_}.txt").write_text(ESCAPES[id_]["code"])
    (folder / "driver.py").write_text(DRIVER)
    return replace(profile, mounts=(*profile.mounts, Mount("ro", str(folder), "/code")))


@pytest.mark.parametrize("shape", ["standard", "strict", "strict with a broker"])
def test_every_attempt_judged_inside_is_blocked(
    make_profile: MakeProfile, tree: Tree, runtime: Path, shape: str
) -> None:
    ids = judged_inside()
    with fixtures(runtime) as env:
        profile = make_profile(Tier.NONE if shape == "standard" else Tier.CRITICAL, env=env, **limits())
        profile = with_code(profile, runtime, ids)
        if shape == "strict with a broker":
            broker = socket.socket(socket.AF_UNIX)
            broker.bind(str(runtime / "broker.sock"))
            broker.close()
            mount = Mount("socket", str(runtime / "broker.sock"), "/run/interlock/broker.sock")
            profile = replace(profile, sockets=(mount,))
        with trial(profile, (profile.python, "-S", "/code/driver.py"), tree, runtime, life_s=60) as one:
            output = one.run(60)[0].decode(errors="replace")
    found = {row[0]: row for row in (json.loads(x[1:]) for x in output.splitlines() if x.startswith("@"))}
    assert set(found) == set(ids), output[-2000:]
    bad = {}
    for id_, code, text in found.values():
        verdict = "BLOCKED" if code == -31 and id_ == "ns-04" else probe.judge(text.encode())[0]
        # with a broker AF_UNIX opens: the attempt on a socket by name is then refused by what is not bound
        if verdict != "BLOCKED":
            bad[id_] = (code, text[:200])
    assert bad == {}
    assert len(ids) >= 40


@pytest.mark.parametrize("id_", SERIAL)
def test_resources_are_contained(make_profile: MakeProfile, tree: Tree, runtime: Path, id_: str) -> None:
    with fixtures(runtime) as env:
        life = "10" if id_ == "rs-08" else "2"
        profile = make_profile(env={**env, "ESC_LIVE_S": life}, **{**limits(), "cpu_seconds": 1})
        code = ESCAPES[id_]["code"]
        with trial(profile, (profile.python, "-S", "-c", code), tree, runtime) as one:
            output, outcome = one.run(15)
    killed = outcome == {"signal": 9}
    assert killed or probe.judge(output)[0] == "BLOCKED", (output, outcome)


@pytest.mark.parametrize("id_", KILLED)
def test_the_unkillable_die_with_the_group(make_profile: MakeProfile, tree: Tree, runtime: Path, id_: str) -> None:
    with fixtures(runtime) as env:
        profile = make_profile(env={**env, "ESC_LIVE_S": "60"}, **limits())
        argv = (profile.python, "-S", "-c", ESCAPES[id_]["code"])
        with trial(profile, argv, tree, runtime) as one:
            one.go()
            time.sleep(0.6)
            assert len(one.group.pids()) >= 3, "alive before: monitor, init and at least one of its own"
            begin = time.monotonic()
            put_down(one.group)
            assert time.monotonic() - begin < 1
            assert b"ESCAPED" not in one.read(0.2)
            assert not (one.disk.work / "got_term").exists()


def test_a_daemon_ends_with_the_main_command(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with fixtures(runtime) as env:
        profile = make_profile(env={**env, "ESC_LIVE_S": "60"}, **limits())
        argv = (profile.python, "-S", "-c", ESCAPES["uk-02"]["code"])
        with trial(profile, argv, tree, runtime) as one:
            output, outcome = one.run(10)
            assert outcome == {"exit": 0}
            end = time.monotonic() + 1
            while one.group.populated() and time.monotonic() < end:
                time.sleep(0.01)
            assert one.group.pids() == []
            assert b"ESCAPED" not in output


@pytest.mark.parametrize("id_", list(CONTROLS))
def test_an_attempt_escapes_without_its_layer(
    make_profile: MakeProfile, tree: Tree, runtime: Path, id_: str
) -> None:
    if id_ in ("nt-01", "nt-07", "nt-08") and not routable():
        pytest.skip("control unavailable: this host has no address but loopback")
    code = ESCAPES[id_]["code"]
    if id_ == "fs-10":
        code = "import os; os.makedirs('/work/.git/hooks')\n" + code
    with fixtures(runtime) as env:
        profile = make_profile(env=env, **limits())
        verdict, detail = probe.judge(probe._without(CONTROLS[id_], profile, code, tree, runtime))
    assert verdict == "ESCAPED", detail
