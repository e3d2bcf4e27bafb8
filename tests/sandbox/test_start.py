"""The start: each missing layer refuses and leaves nothing, and what is running is what was asked for."""

import json
import marshal
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from interlock.errors import LayerMissing
from sandbox import bwrap, layers, start, work
from sandbox.cgroup import Group, Tree
from sandbox.profile import Host, Mount, Profile
from sandbox.start import StartSpec
from sandbox.trial import put_down, trial, write_page

from .conftest import MakeProfile

pytestmark = pytest.mark.root
ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def ready(profile: Profile, tree: Tree, runtime: Path) -> Iterator[StartSpec]:
    group = tree.create("ready_1.1", profile.bounds.group)
    disk = work.mount(runtime, "ready_1.1", profile)
    write_page(runtime / "page", 20)
    try:
        yield StartSpec(profile, ("true",), group, runtime / "page", disk)
    finally:
        put_down(group)
        disk.remove()


def refused(spec: StartSpec) -> LayerMissing:
    with pytest.raises(LayerMissing) as caught:
        start.start(spec)
    assert spec.group.pids() == [], "nothing was started"
    return caught.value


def test_the_effective_profile_is_what_the_kernel_says(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    profile = make_profile()
    with trial(profile, ("sleep", "5"), tree, runtime) as one:
        facts = one.started.effective
        assert facts["profile"] == profile.digest()
        assert facts["uid"] == profile.uid
        assert facts["seccomp"] == "2"
        assert set(facts["capabilities"]) == {"0" * 16}
        assert "/work/.git tmpfs ro" in facts["mounts"]
        assert "/ tmpfs ro" in facts["mounts"]
        assert one.started.effective_digest.startswith("sha256:")
        one.go()
        time.sleep(0.2)
        uids = {os.stat(f"/proc/{p}").st_uid for p in one.group.pids()} - {0}
        assert uids == {profile.uid}
        status = Path(f"/proc/{one.group.pids()[-1]}/status").read_text()
        assert f"Uid:\t{profile.uid}\t{profile.uid}\t{profile.uid}\t{profile.uid}" in status


def test_the_record_of_two_equal_starts_is_equal(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    profile = make_profile()
    digests = []
    for _ in range(2):
        with trial(profile, ("true",), tree, runtime) as one:
            digests.append(one.started.effective_digest)
    assert digests[0] == digests[1]


def test_refuses_when_bubblewrap_is_missing(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ready(make_profile(), tree, runtime) as spec:
        with monkeypatch.context() as patch:
            patch.setenv("PATH", str(runtime))
            assert refused(spec).code == "layer_missing.bwrap"
        started = start.start(spec)
        started.close()
        started.process.wait()


def test_refuses_when_others_can_change_bubblewrap(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = runtime / "bwrap"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o777)
    with ready(make_profile(), tree, runtime) as spec, monkeypatch.context() as patch:
        patch.setenv("PATH", str(runtime))
        assert refused(spec).code == "layer_missing.bwrap"
        with pytest.raises(LayerMissing, match="others than root"):
            layers.find_bwrap()
        fake.chmod(0o755)
        assert layers.find_bwrap() == str(fake), "the positive control"


def test_refuses_when_bubblewrap_does_nothing(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = runtime / "bwrap"
    fake.write_text("#!/bin/sh\nexit 0\n")
    fake.chmod(0o755)
    runtime.chmod(0o755)
    with ready(make_profile(), tree, runtime) as spec, monkeypatch.context() as patch:
        patch.setenv("PATH", f"{runtime}:{os.environ['PATH']}")
        assert refused(spec).code == "layer_missing.bwrap"


def test_refuses_when_user_namespaces_are_forbidden(tree: Tree, runtime: Path) -> None:
    """A copy of the host's /proc/sys with the limit at 0, in a mount namespace of the asking process."""
    (runtime / "zero").write_text("0\n")
    code = (
        "from sandbox import layers\nfrom interlock.errors import LayerMissing\n"
        "print([x.name for x in layers.survey() if not x.present], layers.tiers(layers.survey()))"
    )
    words = [sys.executable, "-c", code]
    plain = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True)
    assert plain.stdout.strip().startswith("[] ['none', 'high', 'critical']"), "the positive control"
    script = 'mount --bind "$1" /proc/sys/user/max_user_namespaces; shift; exec "$@"'
    unshared = ["unshare", "-m", "--propagation", "private", "sh", "-c", script, "sh", str(runtime / "zero")]
    found = subprocess.run([*unshared, *words], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "['user_namespaces'] []"


def test_refuses_when_the_kernel_forbids_user_namespaces_in_fact(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bubblewrap itself fails where the survey saw nothing: the refusal names the layer all the same."""
    real = bwrap.argv
    limited = ["/usr/bin/unshare", "-U", "-r"]
    script = 'echo 0 > /proc/sys/user/max_user_namespaces 2>/dev/null; exec "$@"'
    monkeypatch.setattr(bwrap, "argv", lambda *a: [*limited, "/bin/sh", "-c", script, "sh", *real(*a)])
    with ready(make_profile(), tree, runtime) as spec:
        assert refused(spec).code in ("layer_missing.user_namespaces", "layer_missing.bwrap")


def test_refuses_when_the_control_group_is_gone(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with ready(make_profile(), tree, runtime) as spec:
        gone = Group("gone", {k: v.replace("ready_1.1", "gone_1.1") for k, v in spec.group.paths.items()})
        assert refused(replace(spec, group=gone)).code == "layer_missing.cgroup"


def test_refuses_when_the_filter_is_not_in_force(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bwrap.argv

    def without(*args: object) -> list[str]:
        words = real(*args)  # type: ignore[arg-type]
        at = words.index("--seccomp")
        return words[:at] + words[at + 2 :]

    monkeypatch.setattr(bwrap, "argv", without)
    with ready(make_profile(), tree, runtime) as spec:
        error = refused(spec)
        assert error.code in ("layer_missing.seccomp", "layer_missing.descriptors")


@pytest.mark.parametrize(("words", "layer"), [
    (["--remount-ro", "/"], "mounts"), (["--as-pid-1"], "pid_namespace"),
])
def test_refuses_when_a_layer_of_bubblewrap_is_left_out(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], layer: str
) -> None:
    real = bwrap.argv

    def without(*args: object) -> list[str]:
        found = real(*args)  # type: ignore[arg-type]
        at = next(i for i in range(len(found)) if found[i : i + len(words)] == words)
        return found[:at] + found[at + len(words) :]

    monkeypatch.setattr(bwrap, "argv", without)
    with ready(make_profile(), tree, runtime) as spec:
        assert refused(spec).code == f"layer_missing.{layer}"


def test_refuses_when_the_network_is_shared(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = bwrap.argv

    def shared(*args: object) -> list[str]:
        found = real(*args)  # type: ignore[arg-type]
        return [found[0], "--unshare-all", "--share-net", *found[2:]]

    monkeypatch.setattr(bwrap, "argv", shared)
    with ready(make_profile(), tree, runtime) as spec:
        assert refused(spec).code == "layer_missing.net_namespace"


def test_refuses_when_the_uid_is_taken(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    profile = make_profile()
    other = subprocess.Popen(["/usr/bin/sleep", "30"], user=profile.uid)
    try:
        with ready(profile, tree, runtime) as spec:
            assert refused(spec).code == "layer_missing.uid"
    finally:
        other.kill()
        other.wait()


def test_refuses_when_the_landlock_of_the_kernel_is_too_old(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    profile = make_profile()
    asked = replace(profile, shape=replace(profile.shape, landlock=99))
    with ready(asked, tree, runtime) as spec:
        assert refused(spec).code == "layer_missing.landlock"


def test_refuses_when_the_deadline_page_is_no_page(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with ready(make_profile(), tree, runtime) as spec:
        spec.deadline_page.write_bytes(b"short")
        assert refused(spec).code == "layer_missing.deadline_page"


def with_mount(profile: Profile, path: Path) -> Profile:
    return replace(profile, mounts=(*profile.mounts, Mount("ro", str(path), "/data/x")))


def test_refuses_when_a_source_is_reached_by_a_link(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    (runtime / "real").mkdir(mode=0o755)
    (runtime / "link").symlink_to(runtime / "real")
    (runtime / "up").symlink_to("/etc")
    for path in (runtime / "link", runtime / "up/ssl"):
        with ready(with_mount(make_profile(), path), tree, runtime) as spec:
            assert refused(spec).code == "layer_missing.source"
    with ready(with_mount(make_profile(), runtime / "real"), tree, runtime) as spec:
        started = start.start(spec)
        started.close()
        started.process.wait()


def test_refuses_when_the_runs_uid_cannot_read_a_source_and_names_it(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    secret = runtime / "secret"
    secret.write_text("x")
    secret.chmod(0o600)
    with ready(with_mount(make_profile(), secret), tree, runtime) as spec:
        error = refused(spec)
        assert error.code == "layer_missing.source"
        assert str(secret) in error.message


def guest(profile: Profile, path: Path) -> Profile:
    return replace(profile, sockets=(Mount("socket", str(path), "/run/interlock/broker.sock"),))


def test_one_listed_socket_is_reached_and_no_other(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(runtime / "broker"))
    os.chmod(runtime / "broker", 0o666)
    server.listen(1)
    code = "import socket\ns = socket.socket(socket.AF_UNIX)\ns.connect('/run/interlock/broker.sock')\nprint('in')"
    profile = guest(make_profile(), runtime / "broker")
    try:
        with trial(profile, (profile.python, "-c", code), tree, runtime) as one:
            assert one.run(10)[0] == b"in\n"
            peer, _ = server.accept()
            uid = int.from_bytes(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)[4:8], sys.byteorder)
            assert uid == profile.uid
            peer.close()
    finally:
        server.close()


def test_refuses_when_a_bind_holds_a_socket_that_is_not_listed(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    folder = runtime / "data"
    (folder / "deep").mkdir(parents=True)
    servers = []
    for path in (runtime / "broker", folder / "deep/control"):
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        servers.append(server)
    for server in servers:
        server.close()
    with ready(guest(with_mount(make_profile(), folder), runtime / "broker"), tree, runtime) as spec:
        error = refused(spec)
        assert error.code == "layer_missing.source"
        assert "does not list" in error.message
    (folder / "deep/control").unlink()
    with ready(guest(with_mount(make_profile(), folder), runtime / "broker"), tree, runtime) as spec:
        started = start.start(spec)
        started.close()
        started.process.wait()


def test_a_start_outlives_the_thread_that_made_it(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with ready(make_profile(), tree, runtime) as spec:
        made: list[start.Started] = []
        thread = threading.Thread(target=lambda: made.append(start.start(replace(spec, argv=("sleep", "30")))))
        thread.start()
        thread.join()
        os.write(made[0].pipe_write_fd, b"G")
        assert made[0].report.next(5) == {"go": True}
        time.sleep(0.3)
        assert len(spec.group.pids()) == 3
        put_down(spec.group)
        made[0].process.wait()
        made[0].close()


def test_a_descriptor_leaked_on_purpose_does_not_arrive(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    secret = os.memfd_create("secret", 0)
    os.set_inheritable(secret, True)
    code = (
        "import os\nfor n in range(3, 256):\n    try: print(os.readlink('/proc/self/fd/%d' % n))\n"
        "    except OSError: pass\nprint('end')"
    )
    try:
        profile = make_profile()
        with trial(profile, (profile.python, "-c", code), tree, runtime) as one:
            assert one.run(10)[0] == b"end\n"
    finally:
        os.close(secret)


def test_refuses_when_a_descriptor_was_passed_that_nobody_named(
    make_profile: MakeProfile, tree: Tree, runtime: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = os.memfd_create("secret", os.MFD_CLOEXEC)
    real = start.enter_spec
    monkeypatch.setattr(start, "enter_spec", lambda spec, argv, fds: real(spec, argv, [*fds, secret]))
    try:
        with ready(make_profile(), tree, runtime) as spec:
            assert refused(spec).code == "layer_missing.descriptors"
    finally:
        os.close(secret)


def test_no_litter_is_left(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    before = Path("/proc/self/mountinfo").read_text().count("\n")
    fds = len(os.listdir("/proc/self/fd"))
    profile = make_profile()
    with trial(profile, ("sh", "-c", "echo hi > /work/out; mkdir /work/.git/hooks"), tree, runtime) as one:
        one.run(10)
        put_down(one.group)
        one.disk.tidy(profile)
        assert sorted(os.listdir(one.disk.work)) == ["out"]
    assert [p.name for p in runtime.iterdir()] == []
    assert Path("/proc/self/mountinfo").read_text().count("\n") == before
    assert len(os.listdir("/proc/self/fd")) == fds
    assert tree.groups() == []


def test_a_fork_bomb_is_bounded_and_ends_at_once(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    code = (
        "import os,signal\nsignal.signal(15, 1)\nprint('armed', flush=True)\nwhile True:\n"
        "    try:\n        if os.fork() == 0: os.setsid()\n    except OSError: pass\n"
    )
    profile = make_profile(pids=64)
    with trial(profile, (profile.python, "-S", "-c", code), tree, runtime) as one:
        one.go()
        one.read(5, b"armed")
        time.sleep(0.3)
        assert 20 < len(one.group.pids()) <= 64
        begin = time.monotonic()
        put_down(one.group)
        assert time.monotonic() - begin < 2


LAUNCHER = """
import os, sys, time
sys.path.insert(0, {root!r})
from dataclasses import replace
from pathlib import Path
from interlock.order import Plan
from interlock.tier import Tier
from sandbox import cgroup, layers, start, work
from sandbox.profile import for_plan
from sandbox.trial import write_page
profile = for_plan(Plan(("x",), Tier.CRITICAL, "t", work_mb=8), int(sys.argv[1]), layers.this_host())
runtime = Path(sys.argv[2])
group = cgroup.Group("x", eval(sys.argv[3]))
disk = work.Disk("x", runtime / "runs/x")
print("begin", flush=True)
one = start.start(start.StartSpec(profile, ("sh", "-c", "setsid sleep 60 & sleep 60"), group, runtime / "page", disk))
os.write(one.pipe_write_fd, b"G")
print("live", flush=True)
time.sleep(60)
"""


def _seen(pid: int) -> str:
    """Say what a survivor is and where it waits."""
    found = [str(pid)]
    for name in ("cmdline", "wchan", "syscall", "stat"):
        try:
            found.append(Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")[:300])
        except OSError as error:
            found.append(str(error))
    return " | ".join(found)


@pytest.mark.parametrize("delay_ms", [0, 5, 15, 25, 40, 60, 80, 100, 130, 400])
def test_no_survivor_after_the_launcher_is_killed(
    make_profile: MakeProfile, tree: Tree, runtime: Path, delay_ms: int
) -> None:
    profile = make_profile()
    group = tree.create("killed_1.1", profile.bounds.group)
    disk = work.mount(runtime, "x", profile)
    write_page(runtime / "page", 30)
    words = [sys.executable, "-c", LAUNCHER.format(root=str(ROOT)), str(profile.uid), str(runtime), repr(group.paths)]
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert launcher.stdout is not None
    try:
        assert launcher.stdout.readline() == b"begin\n"
        if delay_ms == 400:
            assert launcher.stdout.readline() == b"live\n"
            end = time.monotonic() + 3
            while len(group.pids()) < 5 and time.monotonic() < end:
                time.sleep(0.01)
            assert len(group.pids()) >= 5, "alive before: monitor, init, shell, both sleepers"
        else:
            time.sleep(delay_ms / 1000)
        launcher.send_signal(signal.SIGKILL)
        launcher.wait()
        end = time.monotonic() + 3
        while group.populated() and time.monotonic() < end:
            time.sleep(0.01)
        assert group.pids() == [], [_seen(pid) for pid in group.pids()]
    finally:
        launcher.stdout.close()
        put_down(group)
        disk.remove()


def test_a_stand_alone_file_reads_its_refusal_back(runtime: Path) -> None:
    (runtime / "spec").write_bytes(marshal.dumps({"procs_files": ["/no/such"]}))
    with open(runtime / "spec", "rb") as file:
        done = subprocess.run(
            [*start.interpreter(), str(ROOT / "sandbox/enter.py"), str(file.fileno())], pass_fds=[file.fileno()],
            capture_output=True, check=False,
        )
    assert done.returncode == 70
    assert json.loads(done.stderr)["layer"] == "cgroup"


def test_the_interpreter_of_run_init_is_one_nobody_else_can_change(host: Host) -> None:
    found = os.stat(host.python)
    assert found.st_uid == 0
    assert not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert layers.find_bwrap().startswith("/")
