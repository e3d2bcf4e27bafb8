"""Kill and proof against real control groups and real processes."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from interlock.order import Result
from killswitch import ladder
from killswitch.ladder import climb
from killswitch.verify import Target, exited, look_at, removed
from sandbox.cgroup import Group, Limits, Tree, own_tree
from tests.killswitch.conftest import need_root
from tests.killswitch.host import HOSTILE, SLEEP, wait_for

pytestmark = pytest.mark.root


@pytest.fixture
def tree() -> Iterator[Tree]:
    need_root()
    found = own_tree(f"kstest-{os.getpid()}")
    yield found
    for group in found.groups():  # without the ladder: it is what these tests are about
        group.thaw()
        group.kill()
        wait_for(lambda group=group: not group.populated())
    found.remove()


@pytest.fixture
def group(tree: Tree) -> Group:
    return tree.create("run_1.1", Limits(80, 256))


def freeze_v1(group: Group, below: str = "") -> None:
    state = Path(group.paths["freezer"] + below, "freezer.state")
    state.write_text("FROZEN")
    wait_for(lambda: state.read_text() == "FROZEN\n")  # until then it says FREEZING, and a kill still works


class Living:
    """A process in the group; always reaped."""

    def __init__(self, group: Group, code: str = SLEEP, below: str = "") -> None:
        joins = [f"{p}{below}/cgroup.procs" for p in group.paths.values() if os.path.isdir(f"{p}{below}")]
        prefix = f"import os\nfor p in {joins!r}: open(p, 'w').write(str(os.getpid()))\n"
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-W", "ignore", "-c", prefix + code])
        wait_for(lambda: self.process.pid in group.pids())

    def reap(self) -> None:
        self.process.wait(5)


def test_ends_a_hostile_group_and_proves_it(group: Group) -> None:
    living = Living(group, HOSTILE)
    wait_for(lambda: len(group.pids()) > 40)
    outcome = climb(Target(group))
    assert outcome.result is Result.CONFIRMED
    assert outcome.found > 40
    assert not group.exists()
    living.reap()


def test_each_primitive_ends_it_without_the_other(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    living = Living(group)
    pidfd = os.pidfd_open(living.process.pid)
    monkeypatch.setattr(Group, "kill", lambda self: None)
    assert look_at(living.process.pid) is not None
    assert climb(Target(group, pidfd)).result is Result.CONFIRMED
    assert exited(pidfd)
    os.close(pidfd)
    living.reap()


@pytest.mark.parametrize("below", ["", "/child"])
def test_a_frozen_group_dies_too(group: Group, below: str) -> None:
    if "freezer" not in group.paths:
        pytest.skip("no v1 freezer on this host")
    if below:
        for path in group.paths.values():
            os.mkdir(path + below)
    living = Living(group, below=below)
    freeze_v1(group, below)
    Path(group.paths["unified"] + below, "cgroup.freeze").write_text("1")
    assert look_at(living.process.pid) is not None
    begin = time.monotonic()
    assert climb(Target(group)).result is Result.CONFIRMED
    assert time.monotonic() - begin < 2
    living.reap()


def test_a_pass_that_cannot_thaw_is_not_confirmed(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    if "freezer" not in group.paths:
        pytest.skip("no v1 freezer on this host")
    living = Living(group)
    freeze_v1(group)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "thaw", lambda self: None)
        outcome = climb(Target(group), limit_ms=300)
        assert (outcome.result, outcome.why) == (Result.NOT_CONFIRMED, "group")
        assert [s.pid for s in outcome.survivors] == [living.process.pid]
        assert outcome.survivors[0].state in "DSRT"
    assert climb(Target(group)).result is Result.CONFIRMED
    living.reap()


def test_G14_proof_is_the_removal_of_the_group_not_that_it_is_empty(group: Group) -> None:
    assert not group.populated()
    assert removed(Target(group))
    assert not group.exists()
    for path in group.paths.values():
        with pytest.raises(OSError):
            Path(path, "cgroup.procs").write_text(str(os.getpid()))


def test_refuses_when_a_group_on_the_books_is_not_there(tree: Tree) -> None:
    ghost = Group("run_9.1", {k: f"{p}/runs/run_9.1" for k, p in tree.paths.items()})
    outcome = climb(Target(ghost))
    assert (outcome.result, outcome.found) == (Result.NOT_CONFIRMED, 0)
    assert outcome.why == "the control group is not there"
    assert climb(Target(ghost), removed=True).result is Result.CONFIRMED


def test_refuses_when_a_process_of_the_uid_lives_elsewhere(group: Group) -> None:
    code = "import os; os.setresuid(60990, 60990, 60990)\n" + SLEEP
    outside = subprocess.Popen([sys.executable, "-I", "-S", "-c", code])
    wait_for(lambda: "Uid:\t60990\t" in Path(f"/proc/{outside.pid}/status").read_text())
    try:
        outcome = climb(Target(group, None, 60_990), limit_ms=300)
        assert (outcome.result, outcome.why, outcome.removed) == (Result.NOT_CONFIRMED, "uid", True)
        assert [s.pid for s in outcome.survivors] == [outside.pid]
    finally:
        outside.kill()
        outside.wait()
    assert climb(Target(group, None, 60_990), removed=True).result is Result.CONFIRMED


def test_a_step_that_fails_does_not_keep_the_next_from_being_tried(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Group, *_: object) -> None:
        raise OSError("no")

    living = Living(group)
    monkeypatch.setattr(Group, "thaw", broken)
    monkeypatch.setattr(Group, "set_pids_max", broken)
    assert climb(Target(group)).result is Result.CONFIRMED
    living.reap()
    assert ladder.CLIMB_MS < ladder.LIMIT_MS == 5_000
