"""Environments of a node: which folders it may offer, what a run sees of them, and what a plan cannot have here."""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from interlock.errors import Denied, Malformed, NotFound, Refusal, Unavailable, Usage
from interlock.order import Plan
from interlock.tier import Tier
from runners import environments, launch
from runners.announcer import Announcer
from runners.environments import chosen
from runners.kept_program import KeptProgram
from sandbox import bwrap, layers, probe
from sandbox.cgroup import own_tree
from sandbox.profile import (
    ENGINE_ROOT,
    ENGINE_SOCKET,
    STRICT,
    EngineSeat,
    Environment,
    Host,
    Mount,
    for_plan,
)
from sandbox.trial import trial
from tests.runners.conftest import needs_root

HOST = Host((Mount("ro", "/usr", "/usr"),), "/opt/py", "/opt/py/bin/python3.11", "/srv/init", "/srv/guest/interlock")
GUEST = Environment("guest", "/work/checkout/.venv-guest", "/opt/py")


def plan(tier: Tier = Tier.NONE, **more: object) -> Plan:
    return replace(Plan(("true",), tier, "lab"), **more)  # type: ignore[arg-type]


@pytest.fixture
def venv(short: Path) -> Path:
    """A folder that looks like a virtual environment of this interpreter."""
    place = short / "env"
    (place / "bin").mkdir(parents=True)
    (place / "lib").mkdir()
    (place / "lib" / "mark.py").write_text("WORD = 'from the environment'\n")
    (place / "bin" / "python").symlink_to(os.path.realpath(sys.executable))
    (place / "pyvenv.cfg").write_text(f"home = {os.path.realpath(sys.base_prefix)}/bin\n")
    for path in (place, *place.rglob("*")):
        if not path.is_symlink():
            path.chmod(0o755)
    return place


def code_of(words: list[str], hidden: tuple[Path, ...] = ()) -> str:
    with pytest.raises(Refusal) as refusal:
        environments.environments(words, hidden)
    assert refusal.value.next_step
    return refusal.value.code


# --- which folders may be offered -----------------------------------------------------------------------------------
def test_reads_prefix_and_base_of_a_virtual_environment(venv: Path) -> None:
    found = environments.environments([f"guest={venv}"])
    assert found == {"guest": Environment("guest", str(venv), os.path.realpath(sys.base_prefix))}


@pytest.mark.parametrize("word", ["guest", "Guest=/x", "=/x", "guest=relative", "a b=/x"])
def test_refuses_words_that_name_no_environment(word: str) -> None:
    with pytest.raises(Usage):
        environments.environments([word])


def test_refuses_a_name_twice(venv: Path) -> None:
    assert code_of([f"guest={venv}", f"guest={venv}"]) == "usage.environment"


def test_refuses_what_the_uid_of_a_run_could_not_read(venv: Path) -> None:
    (venv / "lib" / "mark.py").chmod(0o600)
    assert code_of([f"guest={venv}"]) == "unavailable.environment"
    (venv / "lib" / "mark.py").chmod(0o644)
    (venv / "lib").chmod(0o700)
    assert code_of([f"guest={venv}"]) == "unavailable.environment"
    (venv / "lib").chmod(0o755)
    assert environments.environments([f"guest={venv}"])


def test_refuses_a_folder_with_a_socket(venv: Path) -> None:
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(venv / "lib" / "door"))
        (venv / "lib" / "door").chmod(0o755)
        assert code_of([f"guest={venv}"]) == "unavailable.environment"
    (venv / "lib" / "door").unlink()
    assert environments.environments([f"guest={venv}"])


@pytest.mark.parametrize("prefix", ["/", "/etc", "/run", "/proc/self", "/tmp", "/dev/shm"])
def test_refuses_places_that_no_run_sees(prefix: str) -> None:
    assert code_of([f"guest={prefix}"]) == "unavailable.environment"


def test_refuses_what_holds_or_lies_in_the_nodes_own_state(venv: Path) -> None:
    for hidden in (venv / "lib", venv, venv.parent):
        assert code_of([f"guest={venv}"], (hidden,)) == "unavailable.environment"
    assert environments.environments([f"guest={venv}"], (venv.parent / "state",))


def test_refuses_an_interpreter_from_elsewhere(venv: Path) -> None:
    (venv / "bin" / "python").unlink()
    assert code_of([f"guest={venv}"]) == "unavailable.environment"
    other = venv.parent / "python"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    (venv / "bin" / "python").symlink_to(other)
    assert code_of([f"guest={venv}"]) == "unavailable.environment"


def test_refuses_a_name_that_is_not_offered() -> None:
    assert chosen("", {}) is None
    assert chosen("guest", {"guest": GUEST}) is GUEST
    with pytest.raises(NotFound) as refusal:
        chosen("other", {"guest": GUEST})
    assert refusal.value.code == "not_found.environment"


# --- what a run sees ------------------------------------------------------------------------------------------------
def test_an_environment_lies_at_its_own_path_and_first_on_the_path() -> None:
    made = for_plan(plan(environment="guest"), 60_100, HOST, environment=GUEST)
    assert Mount("ro", GUEST.prefix, GUEST.prefix) in made.mounts
    assert dict(made.env)["PATH"].startswith(f"{GUEST.prefix}/bin:/opt/py/bin:")
    bases = [m.target for m in made.mounts if m.target == "/opt/py"]
    assert bases == ["/opt/py"]
    other = for_plan(plan(environment="guest"), 60_100, HOST, environment=replace(GUEST, base="/opt/other"))
    assert Mount("ro", "/opt/other", "/opt/other") in other.mounts


def test_the_runs_own_disk_covers_no_environment() -> None:
    made = for_plan(plan(environment="guest"), 60_100, HOST, environment=GUEST)
    words = bwrap.argv(made, bwrap.Descriptors(3, 4, 5))
    own = words.index(bwrap.disk("work"))
    assert words.index("/opt/py") < own < words.index(GUEST.prefix)


def test_refuses_another_environment_than_the_plans() -> None:
    for wanted, given in (("guest", None), ("", GUEST), ("other", GUEST)):
        with pytest.raises(Malformed) as refusal:
            for_plan(plan(environment=wanted), 60_100, HOST, environment=given)
        assert refusal.value.code == "malformed.environment"


def test_several_ranks_open_what_they_need_and_nothing_else() -> None:
    one, two = (for_plan(plan(ranks=n), 60_100, HOST) for n in (1, 2))
    assert (one.ranks, two.ranks) == (1, 2)
    assert [m.target for m in two.mounts if m not in one.mounts] == ["/etc/hosts"]
    gone = {p.id for p in probe.applying(one)} - {p.id for p in probe.applying(two)}
    assert gone == {"netlink"}
    assert "netlink-other" in {p.id for p in probe.applying(two)}


def test_a_report_of_other_probes_than_todays_proves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made, asked = for_plan(plan(), 60_100, HOST), list[str]()

    def run_one(_profile: object, one: probe.Probe, *_: object) -> probe.ProbeResult:
        asked.append(one.id)
        return probe.ProbeResult(one.id, "BLOCKED")

    monkeypatch.setattr(probe, "run_one", run_one)
    monkeypatch.setattr(probe, "_CACHE", {})
    old = tuple(probe.ProbeResult(p.id, "BLOCKED") for p in probe.applying(made)[1:])
    key = (made.probed_as(), probe.boot_id())
    probe._CACHE[key] = probe.ProbeReport(key[0], made.shape.name, key[1], old)
    for _ in range(2):  # the second is from the cache
        report = probe.run_all(made, None, Path("/nowhere"))  # type: ignore[arg-type]
        probe.require(report, made)
    assert asked == [p.id for p in probe.applying(made)]


@pytest.mark.parametrize("tier", [Tier.HIGH, Tier.CRITICAL])
def test_refuses_ranks_without_tcp(tier: Tier) -> None:
    with pytest.raises(Denied) as refusal:
        for_plan(plan(tier, ranks=2), 60_100, HOST)
    assert refusal.value.code == "denied.profile"
    assert for_plan(plan(tier), 60_100, HOST).shape is STRICT


def test_an_engine_has_a_second_socket_and_its_programs() -> None:
    serving = plan(serve=True, guest=True, weights=("sha256:" + "0" * 64,), model="m")
    seat = EngineSeat("/srv/runners/inference", "/srv/x/engine.sock")
    made = for_plan(serving, 60_100, HOST, broker="/srv/x/guest.sock", engine=seat)
    assert made.sockets[1] == Mount("socket", "/srv/x/engine.sock", ENGINE_SOCKET)
    assert Mount("ro", "/srv/runners/inference", f"{ENGINE_ROOT}/runners/inference") in made.mounts
    assert dict(made.env)["PYTHONPATH"] == f"/opt/interlock-guest:{ENGINE_ROOT}"
    for wrong, engine in ((serving, None), (replace(serving, serve=False), seat)):
        with pytest.raises(Malformed) as refusal:
            for_plan(wrong, 60_100, HOST, broker="/srv/x/guest.sock", engine=engine)
        assert refusal.value.code == "malformed.engine"


# --- what a plan cannot have on this node ---------------------------------------------------------------------------
def test_refuses_before_anything_is_done() -> None:
    def away() -> None:
        raise Unavailable("away", code="gateway")

    station = SimpleNamespace(environments={"guest": GUEST}, gateway=away)
    launch.require(station, plan(environment="guest", ranks=2))  # type: ignore[arg-type]
    for wrong, code in ((plan(environment="other"), "not_found.environment"),
                        (plan(Tier.HIGH, ranks=2), "denied.profile"), (plan(serve=True), "unavailable.gateway")):
        with pytest.raises(Refusal) as refusal:
            launch.require(station, wrong)  # type: ignore[arg-type]
        assert refusal.value.code == code


# --- in a real sandbox ----------------------------------------------------------------------------------------------
@pytest.mark.root
@needs_root
def test_a_run_uses_the_environment_and_cannot_change_it(venv: Path, short: Path) -> None:
    host = layers.this_host()
    offered = environments.environments([f"guest={venv}"])["guest"]
    uid = 60_100 + os.getpid() % 9 * 100 + 98
    made = for_plan(plan(environment="guest", memory_mb=256, work_mb=8), uid, host, environment=offered)
    code = (f"import sys; sys.path.insert(0, '{venv}/lib'); import mark\nprint(sys.prefix == '{venv}', mark.WORD)\n"
            f"try: open('{venv}/lib/new', 'w')\nexcept OSError as error: print('errno', error.errno)\n"
            "open('/work/mine', 'w').write('x'); print('own disk')\n")
    tree = own_tree(f"h5e{os.getpid()}")
    try:
        with trial(made, ("python", "-c", code), tree, short / "r") as one:
            said, outcome = one.run(20)
    finally:
        tree.remove()
    assert said.decode().splitlines() == ["True from the environment", "errno 30", "own disk"], said
    assert outcome == {"exit": 0}


# --- programs that a node keeps -------------------------------------------------------------------------------------
class _Line:
    alive, ended = True, False

    def end(self) -> None:
        self.ended = True


def test_a_program_that_died_is_started_again_and_told_once() -> None:
    made: list[_Line] = []
    died: list[str] = []

    def start() -> _Line:
        made.append(_Line())
        return made[-1]

    kept = KeptProgram("gateway", start, died.append)
    with pytest.raises(Unavailable) as refusal:
        kept.line()
    assert refusal.value.code == "unavailable.gateway"
    kept.keep()
    kept.keep()
    assert (len(made), kept.line()) == (1, made[0])
    made[0].alive = False
    with pytest.raises(Unavailable):
        kept.line()
    kept.keep()
    assert (len(made), died, made[0].ended, kept.line()) == (2, ["gateway"], True, made[1])
    kept.end()
    assert made[1].ended


class _Gateway:
    def __init__(self) -> None:
        self.rows = [{"run": "run_a", "attempt": 1, "ready": False, "error": ""},
                     {"run": "run_b", "attempt": 1, "ready": True, "error": ""}]

    def engines(self) -> list[dict[str, object]]:
        return self.rows


def test_each_ready_engine_is_announced_once() -> None:
    told: list[tuple[str, int]] = []
    answers: list[Refusal | None] = [Unavailable("away"), None, Denied("it was stopped"), None]

    def ready(run: str, attempt: int) -> None:
        told.append((run, attempt))
        if (answer := answers.pop(0)) is not None:
            raise answer

    gateway = _Gateway()
    announcer = Announcer(lambda: gateway, SimpleNamespace(engine_ready=ready))  # type: ignore
    with pytest.raises(Unavailable):
        announcer.turn()
    announcer.turn()
    announcer.turn()
    assert told == [("run_b", 1)] * 2
    gateway.rows[0]["ready"] = True
    announcer.turn()
    announcer.turn()
    assert told[2:] == [("run_a", 1)]
    gateway.rows = [{"run": "run_b", "attempt": 2, "ready": True, "error": ""}]
    announcer.turn()
    assert told[3:] == [("run_b", 2)]
