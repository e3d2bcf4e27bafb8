"""Run init in the real sandbox: GO, deadline, end of the pipe, outcome, and what a workload cannot touch."""

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from sandbox import init
from sandbox.cgroup import Tree
from sandbox.profile import INIT_ROOT, Profile
from sandbox.trial import Trial, trial, write_page

from .conftest import MakeProfile

pytestmark = pytest.mark.root
SANDBOX = Path(__file__).resolve().parents[2] / "sandbox"
HOSTILE = (
    "import os,signal,time\n"
    "[signal.signal(s, signal.SIG_IGN) for s in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}]\n"
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True: time.sleep(1)\n    os._exit(0)\n"
    "print('armed', flush=True)\nwhile True: time.sleep(1)\n"
)


@contextmanager
def running(
    profile: Profile, code: str, tree: Tree, runtime: Path, *, life_s: float = 30.0, go: bool = True
) -> Iterator[Trial]:
    with trial(profile, (profile.python, "-I", "-S", "-c", code), tree, runtime, life_s=life_s) as one:
        if go:
            one.go()
        yield one


def dead_within(one: Trial, seconds: float) -> float:
    start = time.monotonic()
    while one.group.populated():
        assert time.monotonic() - start < seconds, one.group.pids()
        time.sleep(0.005)
    return time.monotonic() - start


@pytest.mark.parametrize("value", ["", "plain", 'q"\\\n\x00', "ü€😀", "\ud800", [1, [True, "x"], {}], {"ü": {"a": -1}}])
def test_the_report_is_json(value: object) -> None:
    assert json.loads(init.to_json({"v": value})) == {"v": value}


def test_no_code_of_the_workload_runs_before_go(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), "open('/work/ran','w'); print('ran')", tree, runtime, go=False) as one:
        time.sleep(0.4)
        assert one.group.populated()
        assert not (one.disk.work / "ran").exists()
        one.go()
        assert one.read(5) == b"ran\n"
        assert one.started.report.outcome(2) == {"exit": 0}


def test_refuses_when_the_byte_on_the_pipe_is_not_go(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), "open('/work/ran','w')", tree, runtime, go=False) as one:
        os.write(one.started.pipe_write_fd, b"X")
        assert one.started.report.outcome(2) == {"why": "pipe"}
        dead_within(one, 2)
        assert not (one.disk.work / "ran").exists()


def test_end_of_the_pipe_ends_a_hostile_run(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), HOSTILE, tree, runtime) as one:
        assert one.read(5, b"armed") == b"armed\n"
        assert len(one.group.pids()) >= 4, "alive before: monitor, init, command, daemon"
        one.started.release_pipe()
        assert dead_within(one, 2) < 1
        assert one.started.report.outcome(1) == {"why": "pipe"}


@pytest.mark.parametrize("go", [True, False])
def test_the_launchers_death_ends_a_run_whose_supervisor_lives(
    make_profile: MakeProfile, tree: Tree, runtime: Path, go: bool
) -> None:
    with running(make_profile(), HOSTILE, tree, runtime, go=go) as one:
        if go:
            assert one.read(5, b"armed") == b"armed\n"
        assert one.group.populated()
        os.close(one.started.keep_fd)
        one.started.keep_fd = -1
        dead_within(one, 2)
        assert one.started.report.outcome(1) == {"why": "launcher"}


def test_end_of_the_pipe_before_go_ends_the_run(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), "open('/work/ran','w')", tree, runtime, go=False) as one:
        one.started.release_pipe()
        dead_within(one, 2)
        assert not (one.disk.work / "ran").exists()


def test_G18_the_deadline_ends_a_hostile_run_with_the_pipe_open(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    with running(make_profile(), HOSTILE, tree, runtime) as one:
        assert one.read(5, b"armed") == b"armed\n"
        write_page(one.page, 0.5)
        time.sleep(0.3)
        assert one.group.populated(), "not before its time"
        dead_within(one, 2)
        assert one.started.report.outcome(1) == {"why": "deadline"}


def test_G18_a_renewed_page_keeps_the_run_alive(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), HOSTILE, tree, runtime, life_s=3) as one:
        assert one.read(5, b"armed") == b"armed\n"
        for _ in range(8):
            write_page(one.page, 0.6)
            time.sleep(0.15)
        assert one.group.populated()


def test_G11_the_deadline_counts_before_go(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with running(make_profile(), "open('/work/ran','w')", tree, runtime, go=False) as one:
        write_page(one.page, 0.2)
        assert one.started.report.outcome(3) == {"why": "deadline"}
        dead_within(one, 2)
        assert not (one.disk.work / "ran").exists()


@pytest.mark.parametrize("damage", ["boot", "magic"])
def test_G15_refuses_when_the_page_is_of_another_boot_or_no_page(
    make_profile: MakeProfile, tree: Tree, runtime: Path, damage: str
) -> None:
    with running(make_profile(), HOSTILE, tree, runtime) as one:
        assert one.read(5, b"armed") == b"armed\n"
        at, data = (16, uuid.uuid4().bytes) if damage == "boot" else (0, b"ILKDEAD2")
        fd = os.open(one.page, os.O_RDWR)
        os.pwrite(fd, data, at)
        os.close(fd)
        dead_within(one, 2)


@pytest.mark.parametrize(("code", "outcome"), [
    ("raise SystemExit(7)", {"exit": 7}),
    ("import os; os.kill(os.getpid(), 9)", {"signal": 9}),
    ("import os; os.kill(os.getpid(), 15)", {"signal": 15}),
])
def test_the_outcome_is_the_commands_own(
    make_profile: MakeProfile, tree: Tree, runtime: Path, code: str, outcome: dict[str, int]
) -> None:
    with running(make_profile(), code, tree, runtime) as one:
        one.read(5)
        assert one.started.report.outcome(2) == outcome


def test_a_command_that_is_not_there_says_so(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    with trial(make_profile(), ("/no/such", "x"), tree, runtime) as one:
        output, outcome = one.run(5)
        assert outcome == {"exit": 127}
        assert b"/no/such" in output


def test_daemons_die_with_the_main_child(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    code = HOSTILE.rsplit("while", 1)[0] + "time.sleep(.3); os._exit(0)"
    with running(make_profile(), code, tree, runtime) as one:
        one.read(5, b"armed")
        assert one.started.report.outcome(3) == {"exit": 0}
        dead_within(one, 2)


def test_zombies_are_reaped_while_the_run_lives(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    code = (
        "import os,time\nfor _ in range(200):\n    if os.fork() == 0:\n        if os.fork() == 0: os._exit(0)\n"
        "        os._exit(0)\n    os.wait()\ntime.sleep(.3)\n"
        "print(sum(p.isdigit() for p in os.listdir('/proc')))"
    )
    with running(make_profile(), code, tree, runtime) as one:
        assert one.read(10) == b"2\n"


def without_landlock(profile: Profile, folder: Path, init: str) -> Profile:
    """The one layer removed that would hide whether run init can be traced."""
    (folder / "landlock.py").write_text("def abi(): return 7\ndef restrict(*_): return 7\n")
    (folder / "init.py").write_text(init)
    mounts = tuple(
        replace(m, source=str(folder / Path(m.target).name)) if m.target.startswith(INIT_ROOT) else m
        for m in profile.mounts
    )
    return replace(profile, mounts=mounts)


MEMORY = (
    "import os\ntry:\n    os.close(os.open('/proc/1/mem', os.O_RDWR)); print('ESCAPED')\n"
    "except OSError as e: print('BLOCKED', e.errno)"
)


def test_refuses_when_a_workload_of_the_same_uid_opens_the_memory_of_init(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    source = (SANDBOX / "init.py").read_text()
    with running(without_landlock(make_profile(), runtime, source), MEMORY, tree, runtime) as one:
        assert one.read(5) == b"BLOCKED 13\n"
    dumpable = source.replace("libc.prctl(_DUMPABLE, 0,", "libc.prctl(_DUMPABLE, 1,").replace(
        "libc.prctl(_GET_DUMPABLE, 0, 0, 0, 0) != 0", "False"
    )
    assert dumpable != source
    with running(without_landlock(make_profile(), runtime, dumpable), MEMORY, tree, runtime) as one:
        assert one.read(5) == b"ESCAPED\n", "the positive control"


def test_init_survives_the_signals_of_its_workload(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    code = (
        "import os,time\nfor s in range(1, 64):\n    try: os.kill(1, s)\n    except OSError: pass\n"
        "time.sleep(.2)\nprint('on')"
    )
    with running(make_profile(), code, tree, runtime) as one:
        assert one.read(5) == b"on\n"
        assert one.started.report.outcome(2) == {"exit": 0}


def test_the_guest_package_is_there_and_nothing_else_of_ours(
    make_profile: MakeProfile, tree: Tree, runtime: Path
) -> None:
    code = (
        "import sys; sys.path.append('/opt/interlock-guest')\nimport importlib.util as u\n"
        "print([n for n in ('interlock','policy','audit','kms','sandbox','killswitch','runners','control_plane')"
        " if u.find_spec(n)])"
    )
    with running(make_profile(), code, tree, runtime) as one:
        assert one.read(5) == b"['interlock']\n"


def test_the_cpu_limit_is_hard(make_profile: MakeProfile, tree: Tree, runtime: Path) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    with running(make_profile(cpu_seconds=1), code, tree, runtime) as one:
        assert one.started.report.outcome(10) == {"signal": 9}
