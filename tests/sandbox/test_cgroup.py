"""Control groups on fake trees of both kinds, and on the real one of this host."""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from interlock.errors import LayerMissing, NotFound, Usage
from sandbox import cgroup
from sandbox.cgroup import Group, Limits, Tree, own_tree

FILES = ("cgroup.procs", "cgroup.kill", "cgroup.freeze", "cgroup.events", "cgroup.subtree_control", "pids.max",
         "memory.max", "memory.swap.max", "memory.oom.group", "cpu.max", "memory.limit_in_bytes",
         "cpu.cfs_period_us", "cpu.cfs_quota_us", "freezer.state")


class FakeKernel:
    """Folders that behave like cgroupfs where it matters: files come with mkdir and do not hinder rmdir."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.mkdir, self.rmdir = os.mkdir, os.rmdir
        monkeypatch.setattr(os, "mkdir", self._mkdir)
        monkeypatch.setattr(os, "rmdir", self._rmdir)

    def _mkdir(self, path: str | Path, mode: int = 0o777) -> None:
        self.mkdir(path, mode)
        if str(path).startswith(f"{self.root}/sys"):
            self.fill(Path(path))

    def fill(self, path: Path) -> None:
        for name in FILES:
            (path / name).write_text("populated 0\n" if name == "cgroup.events" else "")

    def _rmdir(self, path: str | Path) -> None:
        if str(path).startswith(f"{self.root}/sys") and Path(path).is_dir():
            if (Path(path) / "cgroup.procs").read_text().strip():
                raise OSError(errno.EBUSY, "busy", str(path))
            for name in FILES:
                (Path(path) / name).unlink(missing_ok=True)
        self.rmdir(path)


def fake_proc(root: Path, mounts: list[tuple[str, str, str]], cgroups: str) -> Path:
    proc = root / "proc"
    proc.mkdir()
    rows = [f"{i} 1 0:{i} / {point} rw - {kind} {kind} rw,{options}" for i, (point, kind, options) in enumerate(mounts)]
    (proc / "mountinfo").write_text("\n".join(rows) + "\n")
    (proc / "cgroup").write_text(cgroups)
    return proc


@pytest.fixture
def unified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    kernel = FakeKernel(tmp_path, monkeypatch)
    own = tmp_path / "sys/user.slice/x.scope"
    own.mkdir(parents=True)
    kernel.fill(own)
    (own / "cgroup.controllers").write_text("cpuset cpu io memory pids\n")
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    proc = fake_proc(tmp_path, [(f"{tmp_path}/sys", "cgroup2", "nsdelegate")], "0::/user.slice/x.scope\n")
    return own_tree("ilk", proc=proc)


@pytest.fixture
def hybrid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    kernel = FakeKernel(tmp_path, monkeypatch)
    mounts, cgroups = [(f"{tmp_path}/sys/unified", "cgroup2", "x")], "0::/\n"
    (tmp_path / "sys/unified").mkdir(parents=True)
    for number, names in enumerate(("pids", "memory", "cpu,cpuacct", "freezer"), 1):
        point = tmp_path / "sys" / names
        (point / "box").mkdir(parents=True)
        kernel.fill(point / "box")
        mounts.append((str(point), "cgroup", names))
        cgroups += f"{number}:{names}:/box\n"
    return own_tree("ilk", proc=fake_proc(tmp_path, mounts, cgroups))


def text(path: str) -> str:
    return Path(path).read_text()


def test_unified_moves_only_itself_and_enables_controllers_on_the_way(unified: Tree) -> None:
    group = unified.create("run_1.1", Limits(50, 64, 150))
    own, root = unified.own["unified"], unified.paths["unified"]
    assert text(f"{root}/self/cgroup.procs") == str(os.getpid())
    assert text(f"{own}/cgroup.subtree_control") == "+pids +memory +cpu"
    assert text(f"{root}/runs/cgroup.subtree_control") == "+pids +memory +cpu"
    path = group.paths["unified"]
    assert group.paths == {"unified": f"{root}/runs/run_1.1"}
    assert text(f"{path}/pids.max") == "50"
    assert text(f"{path}/memory.max") == str(64 << 20)
    assert text(f"{path}/memory.swap.max") == "0"
    assert text(f"{path}/cpu.max") == "150000 100000"


def test_hybrid_takes_limits_from_v1_and_kill_from_v2(hybrid: Tree) -> None:
    group = hybrid.create("run_1.1", Limits(50, 64, 50))
    assert set(group.paths) == {"unified", "pids", "memory", "cpu", "freezer"}
    assert text(f"{group.paths['pids']}/pids.max") == "50"
    assert text(f"{group.paths['memory']}/memory.limit_in_bytes") == str(64 << 20)
    assert text(f"{group.paths['cpu']}/cpu.cfs_quota_us") == "50000"
    assert "/box/ilk/runs/run_1.1" in group.paths["cpu"]
    Path(f"{group.paths['pids']}/pids.max").write_text("")  # a real file is replaced by a write, ours is not
    group.set_pids_max(0)
    assert text(f"{group.paths['pids']}/pids.max") == "0"
    group.kill()
    assert text(f"{group.paths['unified']}/cgroup.kill") == "1"
    assert text(f"{group.paths['pids']}/cgroup.kill") == ""
    assert group.procs_files()[0] == f"{group.paths['unified']}/cgroup.procs"


def test_thaw_reaches_nested_groups_of_both_kinds(hybrid: Tree) -> None:
    group = hybrid.create("run_1.1", Limits(50, 64))
    for key in ("unified", "freezer"):
        os.mkdir(f"{group.paths[key]}/child")
    group.thaw()
    assert text(f"{group.paths['freezer']}/child/freezer.state") == "THAWED"
    assert text(f"{group.paths['unified']}/child/cgroup.freeze") == "0"


def test_thaw_reaches_our_own_folders_above_and_no_higher(hybrid: Tree) -> None:
    group = hybrid.create("run_1.1", Limits(50, 64))
    above = Path(group.paths["freezer"]).parents
    group.thaw()
    assert [text(str(p / "freezer.state")) for p in above[:2]] == ["THAWED", "THAWED"]
    assert text(str(above[2] / "freezer.state")) != "THAWED"


def test_remove_takes_children_first_and_says_busy_while_anything_lives(hybrid: Tree) -> None:
    group = hybrid.create("run_1.1", Limits(50, 64))
    os.mkdir(f"{group.paths['cpu']}/child")
    procs = Path(f"{group.paths['cpu']}/child/cgroup.procs")
    procs.write_text("77\n")
    assert group.pids() == [77]
    assert group.populated()
    with pytest.raises(OSError, match="busy"):
        group.remove()
    assert hybrid.groups() == [group]
    procs.write_text("")
    group.remove()
    assert hybrid.groups() == []
    with pytest.raises(NotFound):
        hybrid.open("run_1.1")


def test_groups_are_runs_only_and_a_program_inside_finds_the_same_tree(hybrid: Tree, tmp_path: Path) -> None:
    hybrid.create("run_1.1", Limits(5, 5))
    hybrid.enter("supervisor")
    assert text(f"{hybrid.paths['memory']}/supervisor/cgroup.procs") == str(os.getpid())
    assert [g.id for g in hybrid.groups()] == ["run_1.1"]
    was = (tmp_path / "proc/cgroup").read_text()
    moved = was.replace("/box", "/box/ilk/supervisor").replace("0::/", "0::/ilk/supervisor")
    (tmp_path / "proc/cgroup").write_text(moved)
    assert own_tree("ilk", proc=tmp_path / "proc").paths == hybrid.paths


def test_refuses_when_a_controller_is_absent(hybrid: Tree, tmp_path: Path) -> None:
    rows = (tmp_path / "proc/cgroup").read_text().splitlines()
    (tmp_path / "proc/cgroup").write_text("\n".join(r for r in rows if ":memory:" not in r) + "\n")
    with pytest.raises(LayerMissing) as caught:
        own_tree("ilk", proc=tmp_path / "proc")
    assert caught.value.code == "layer_missing.cgroup"


def test_refuses_when_there_is_no_v2(tmp_path: Path) -> None:
    with pytest.raises(LayerMissing, match="v2"):
        own_tree("ilk", proc=fake_proc(tmp_path, [], "1:pids:/\n"))


def test_refuses_when_a_limit_cannot_be_set_and_leaves_no_group(hybrid: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup, "_NEEDED", ("pids", "memory", "cpu"))
    real = FakeKernel.fill
    monkeypatch.setattr(FakeKernel, "fill", lambda self, path: (real(self, path), (path / "pids.max").unlink()))
    with pytest.raises(LayerMissing):
        hybrid.create("run_1.1", Limits(5, 5))
    assert not any(os.path.exists(f"{p}/runs/run_1.1") for p in hybrid.paths.values())


@pytest.mark.parametrize("name", ["", "..", "a/b", ".x", "a" * 200])
def test_refuses_when_an_id_could_name_another_folder(hybrid: Tree, name: str) -> None:
    hybrid.create("fine_1.1", Limits(5, 5))
    with pytest.raises(Usage):
        hybrid.create(name, Limits(5, 5))


def inside(group: Group, argv: list[str]) -> subprocess.Popen[bytes]:
    def join() -> None:
        for path in group.procs_files():
            Path(path).write_text(str(os.getpid()))

    return subprocess.Popen(argv, preexec_fn=join, stdin=subprocess.DEVNULL)


@pytest.mark.root
def test_the_real_tree_kills_freezes_and_proves(tree: Tree) -> None:
    group = tree.create("run_1.1", Limits(50, 64, 50))
    process = inside(group, ["sleep", "60"])
    assert process.pid in group.pids()
    with pytest.raises(OSError, match="busy"):
        group.remove()
    group.freeze()
    deadline = time.monotonic() + 2
    while not group.frozen() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert group.frozen()
    group.kill()
    assert process.wait(timeout=5) == -9
    group.remove()
    assert not group.exists()


@pytest.mark.root
def test_a_run_frozen_by_v1_dies_only_after_the_thaw(tree: Tree) -> None:
    group = tree.create("run_1.1", Limits(50, 64))
    if "freezer" not in group.paths:
        pytest.skip("this host has no v1 freezer")
    process = inside(group, ["sleep", "60"])
    state = Path(group.paths["freezer"]) / "freezer.state"
    state.write_text("FROZEN")
    while state.read_text().strip() != "FROZEN":
        time.sleep(0.01)
    group.kill()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.3)
    try:
        group.thaw()
        assert process.wait(timeout=2) == -9
        group.remove()
    finally:
        if group.exists():
            state.write_text("THAWED")  # a thaw that does nothing must not leave a frozen process behind
            process.wait(timeout=5)


@pytest.mark.root
def test_the_task_limit_holds_on_the_real_tree(tree: Tree) -> None:
    group = tree.create("run_1.1", Limits(5, 64))
    code = (
        "import os,time\nn=0\ntry:\n  while n<50:\n    if os.fork()==0: time.sleep(60)\n    n+=1\n"
        "except OSError: pass\nos._exit(n)"
    )
    process = inside(group, [sys.executable, "-S", "-c", code])
    assert process.wait(timeout=10) == 4
    group.kill()
    deadline = time.monotonic() + 5
    while group.populated() and time.monotonic() < deadline:
        time.sleep(0.01)
    group.remove()


@pytest.mark.root
def test_refuses_when_an_id_is_used_twice(tree: Tree) -> None:
    tree.create("run_1.1", Limits(5, 64))
    with pytest.raises(FileExistsError):
        tree.create("run_1.1", Limits(5, 64))
    assert tree.open("run_1.1").exists()
