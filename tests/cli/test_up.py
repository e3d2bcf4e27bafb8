"""What `up` decides before it starts anything; the real start is in tests/demo."""

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from control_plane.cli import doctor, node_options, owners, up
from control_plane.cli.owners import Owner
from control_plane.cli.programs import Places, Program, start_time
from control_plane.cli.terminal import Terminal
from interlock.errors import Conflict, Malformed, NotFound, Unavailable, Usage
from sandbox.reach import package_folders, reach

NOT_ROOT = os.geteuid() != 0


@pytest.fixture
def places() -> Iterator[Places]:
    with tempfile.TemporaryDirectory(prefix="ilk-", dir="/tmp") as folder:
        found = Places.of(Path(folder) / "state", Path(folder) / "run")
        found.state.mkdir()
        yield found


@pytest.mark.parametrize(("host", "node"), [("gpu-07", "gpu-07"), ("GPU_07.lab", "gpu-07-lab"), ("", "node"),
                                            ("a" * 90, "a" * 40), ("../../x", "x")])
def test_a_node_id_is_a_plain_word(host: str, node: str) -> None:
    assert up.node_id(host) == node


def test_refuses_when_the_state_has_other_ports(places: Places) -> None:
    fresh = up.site_of(places, "demo", None, 8443)
    assert (fresh["people_port"], fresh["nodes_port"]) == (7070, 8443)
    places.site_file.write_text(json.dumps(fresh))
    assert up.site_of(places, "demo", 7070, None) == fresh
    with pytest.raises(Conflict) as found:
        up.site_of(places, "demo", 7072, None)
    assert found.value.code == "conflict.site"


def test_refuses_when_the_site_file_is_odd(places: Places) -> None:
    places.site_file.write_text(json.dumps({"people_port": "7070"}))
    with pytest.raises(Malformed):
        up.site_of(places, "demo", None, None)


def test_a_state_without_root_belongs_to_its_owner_alone(places: Places) -> None:
    owners.lay_folders(places, None, None)
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in places.state.iterdir() if p.is_dir()}
    assert modes == {"control": 0o700, "orders": 0o700, "trust": 0o755, "logs": 0o700}


@pytest.mark.root
@pytest.mark.skipif(NOT_ROOT, reason="owners need root")
def test_the_control_plane_owns_its_folders_and_not_the_state(places: Places) -> None:
    """Who owns STATE could rename STATE/supervisor and give it another trust."""
    owners.lay_folders(places, Owner(61001, 61001), Owner(61002, 61002), Owner(61003, 61003))
    uids = {p.name: p.stat().st_uid for p in places.state.iterdir()}
    assert uids == {"control": 61001, "orders": 61001, "trust": 61001, "logs": 0, "shared": 0, "supervisor": 0,
                    "broker": 61002, "gateway": 61003}
    assert places.state.stat().st_uid == 0
    (places.runtime / "x").mkdir(parents=True)
    (places.state / "control").rmdir()
    (places.state / "control").symlink_to(places.runtime)
    with pytest.raises(OSError, match=r"Not a directory|symbolic"):
        owners.lay_folders(places, Owner(61001, 61001), Owner(61002, 61002))
    assert places.runtime.stat().st_uid == 0


def test_root_is_given_up_through_one_program() -> None:
    argv = ["/x/python", "-I", "-m", "control_plane", "serve"]
    assert owners.dropped(argv, None, []) == argv
    made = owners.dropped(argv, Owner(990, 991), [Path("/s/control")], [Path("/s/site.json")])
    assert made[:3] == [sys.executable, "-I", "-S"]
    assert made[3].endswith("sandbox/drop.py")
    assert made[4:8] == ["--uid", "990", "--gid", "991"]
    assert made[-len(argv) - 1:] == ["--", *argv]
    assert made[made.index("--write"):][:2] == ["--write", "/s/control"]
    assert "/s/site.json" in made


def test_each_program_can_reach_its_packages() -> None:
    found = reach()
    for package in [*package_folders(), Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve()]:
        assert any(package.is_relative_to(p) for p in found)


def test_a_closed_checkout_is_reached_package_by_package() -> None:
    """The checkout itself may be 0700: a bind of it would stay closed to the programs that gave up root."""
    checkout = Path(str(up.__file__)).resolve().parents[2]
    assert checkout not in reach()
    assert checkout / "policy" in reach()


def test_refuses_when_a_system_user_would_be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Conflict):
        owners.owner("root")
    assert owners.owner("no-such-user-here") is None


def test_the_master_key_is_amber_until_a_backup_is_confirmed(places: Places) -> None:
    assert doctor.backup_state(places)["state"] == "absent"
    with pytest.raises(NotFound):
        doctor.confirm_backup(places)
    kek = places.state / "control" / "keys" / "kek.key"
    kek.parent.mkdir(parents=True)
    kek.write_bytes(b"k" * 32)
    assert doctor.backup_state(places)["state"] == "unconfirmed"
    assert doctor.confirm_backup(places)["state"] == "confirmed"
    kek.write_bytes(b"j" * 32)
    assert doctor.backup_state(places)["state"] == "unconfirmed"
    assert b"k" * 8 not in (places.state / "kek-backup.json").read_bytes()


def test_doctor_names_layers_tiers_and_the_backup(interlock, places: Places) -> None:
    status, value, _ = interlock("doctor", "--state", str(places.state), "--runtime", str(places.runtime))
    assert status == 0
    assert {"name", "present", "detail", "how_to_get"} == set(value["layers"][0])
    assert value["kek"]["state"] == "absent"
    assert value["programs"] == {"control_plane": False, "killswitch": False, "runners": False}


def test_refuses_when_no_run_could_be_shown_the_data_root(interlock, places: Places) -> None:
    """The sandbox hides these places; the start says so, and not each run afterwards."""
    status, value, _ = interlock("up", "--detach", "--state", str(places.state), "--data-root", str(places.state))
    assert (status, value["error"]["code"]) == (2, "usage.data_root")
    assert "/tmp" in value["error"]["next_step"]
    assert not (places.state / "control").exists()
    assert node_options.options(places, [Path("/usr/share/doc")], []).data_roots == ["/usr/share/doc"]


def test_refuses_when_the_node_runs_with_other_data_roots(places: Places, tmp_path: Path) -> None:
    """A second start keeps what the first was given; other data roots or environments would never reach the node."""
    for name in ("a", "b"):
        (tmp_path / name / "bin").mkdir(parents=True)
        (tmp_path / name / "bin" / "python").touch()
    roots, named = [str(Path("/usr/share/doc"))], [f"guest={tmp_path / 'a'}"]
    node_options.NodeOptions(roots, named).note(places)
    places.runtime.mkdir()
    assert node_options.options(places, [], []) == node_options.NodeOptions(roots, named)
    assert node_options.options(places, [Path("/usr/lib")], [f"x={tmp_path / 'b'}"]).data_roots == ["/usr/lib"]
    Program("runners", os.getpid(), start_time(os.getpid()) or 0).write(places)
    assert node_options.options(places, [Path("/usr/share/doc")], named) == node_options.NodeOptions(roots, named)
    for given in (([Path("/usr/lib")], []), ([], [f"guest={tmp_path / 'b'}"])):
        with pytest.raises(Conflict) as found:
            node_options.options(places, *given)
        assert found.value.code == "conflict.site"
    node_options.data_roots_file(places).write_text("{}")
    with pytest.raises(Malformed):
        node_options.options(places, [], [])


@pytest.mark.parametrize("row", ["guest", "=/usr", "Guest=/usr", "guest=/usr/share/doc", "guest="])
def test_refuses_when_an_environment_has_no_name_or_no_python(places: Places, row: str) -> None:
    with pytest.raises(Usage) as found:
        node_options.options(places, [], [row])
    assert found.value.code == "usage.environment"
    assert node_options.environment("guest=/usr") == "guest=/usr" if Path("/usr/bin/python").exists() else True

def test_a_closed_signer_file_reaches_the_control_plane_as_a_copy(places: Places) -> None:
    signer = places.state / "vera.key.pub.json"
    signer.write_text("{}")
    signer.chmod(0o600)
    places.runtime.mkdir()
    none = node_options.NodeOptions([], [])
    rise = up.Rise(places, Terminal(True), {}, [signer], none, [], True, control=Owner(61001, 61001))
    with rise.readable(signer) as file:
        assert (stat.S_IMODE(file.stat().st_mode), file.read_text()) == (0o644, "{}")
    assert not file.exists()
    assert stat.S_IMODE(signer.stat().st_mode) == 0o600


@pytest.mark.parametrize("option", ["--signer", "--data-root"])
def test_refuses_when_a_named_path_is_not_there(interlock, places: Places, option: str) -> None:
    status, value, _ = interlock("up", "--detach", "--state", str(places.state), option, str(places.state / "nope"))
    assert (status, value["error"]["code"].partition(".")[0]) == (2, "usage")
    assert not (places.state / "control").exists()


@pytest.mark.root
@pytest.mark.skipif(NOT_ROOT, reason="starts the control plane under its own user")
def test_refuses_when_the_port_is_in_use(places: Places) -> None:
    """One clear message, and nothing half-started stays."""
    with socket.socket() as taken, socket.socket() as spare:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        spare.bind(("127.0.0.1", 0))
        other = spare.getsockname()[1]
        spare.close()
        command = [str(Path(sys.executable).parent / "interlock"), "--json", "up", "--detach", "--site", "demo",
                   "--gateway-port", str(free_port()),
                   "--people-port", str(taken.getsockname()[1]), "--nodes-port", str(other), "--state",
                   str(places.state), "--runtime", str(places.runtime)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    error = json.loads(done.stdout)["error"]
    assert (done.returncode, error["code"]) == (3, "unavailable.port"), done.stdout
    assert error["next_step"]
    assert not list(places.runtime.glob("*.pid"))
    assert not (places.runtime / "join.json").exists()


def test_doctor_says_what_is_missing(interlock, places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("doctor", "--state", str(places.state), "--runtime", str(places.runtime))
    assert {x["name"]: x["present"] for x in interlock(*words)[1]["layers"]}["seccomp"]
    monkeypatch.setenv("PATH", str(places.state))
    status, value, _ = interlock(*words)
    bwrap = next(x for x in value["layers"] if x["name"] == "bwrap")
    assert (status, bwrap["present"], value["tiers"]) == (0, False, [])
    assert "bubblewrap" in bwrap["how_to_get"]


def test_refuses_when_the_state_is_half_made(interlock, places: Places) -> None:
    half = places.state / "control" / "keys"
    half.mkdir(parents=True)
    (half / "ca.pem").write_text("begun")
    status, value, _ = interlock("up", "--detach", "--state", str(places.state), "--runtime", str(places.runtime),
                                 "--gateway-port", str(free_port()))
    assert (status, value["error"]["code"]) == (1, "conflict.half_made")
    assert [p.name for p in half.iterdir()] == ["ca.pem"]
    assert not list(places.runtime.glob("*.pid"))


# --- a state that an older program made -------------------------------------------------------------
OLD_SITE = {"site": "demo", "people_port": 7070, "nodes_port": 7071, "node": "n1"}


def risen(places: Places, monkeypatch: pytest.MonkeyPatch, *, root: bool = False) -> up.Rise:
    monkeypatch.setattr(owners, "lay_folders", lambda *_: None)
    monkeypatch.setattr(up.Rise, "_user", lambda *_: Owner(61001, 61001))
    return up.Rise(places, Terminal(as_json=True), up.site_of(places, "demo", None, None), [],
                   node_options.NodeOptions([], []), [], is_root=root)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def node_runs(places: Places) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a node which an older program started."""
    places.runtime.mkdir(parents=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        start = start_time(process.pid)
        assert start is not None
        Program(up.NODE, process.pid, start).write(places)
        yield process
        process.kill()


def test_an_old_site_gets_a_gateway_and_is_told_so(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places.site_file.write_text(json.dumps(OLD_SITE))
    rise = risen(places, monkeypatch)
    rise.prepare()
    assert places.site() == {**OLD_SITE, "gateway_port": node_options.DEFAULT_GATEWAY_PORT}
    assert ["the gateway's port" in made for made in rise.made] == [True]
    again = risen(places, monkeypatch)
    again.prepare()
    assert again.made == []


def test_the_gateways_port_changes_only_while_no_node_runs(
    places: Places, node_runs: subprocess.Popen[bytes]
) -> None:
    places.site_file.write_text(json.dumps({**OLD_SITE, "gateway_port": 7072}))
    with pytest.raises(Conflict):
        up.site_of(places, "demo", None, None, 7074)
    node_runs.kill()
    node_runs.wait()
    assert up.site_of(places, "demo", None, None, 7074)["gateway_port"] == 7074


def test_refuses_when_the_gateways_port_is_anothers(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The address of another site's gateway would be shown as ours."""
    places.site_file.write_text(json.dumps({**OLD_SITE, "gateway_port": free_port()}))
    monkeypatch.setattr(node_options, "ENDING_S", 0.0)
    with socket.socket() as other:
        other.bind(("127.0.0.1", up.site_of(places, "demo", None, None)["gateway_port"]))
        other.listen()
        with pytest.raises(Unavailable) as found:
            risen(places, monkeypatch, root=True).prepare()
    assert (found.value.code, "--gateway-port" in found.value.next_step) == ("unavailable.port", True)
    risen(places, monkeypatch, root=True).prepare()


def test_says_that_a_running_node_has_no_gateway(
    places: Places, monkeypatch: pytest.MonkeyPatch, node_runs: subprocess.Popen[bytes]
) -> None:
    places.site_file.write_text(json.dumps({**OLD_SITE, "gateway_port": 7072}))
    rise = risen(places, monkeypatch)
    assert [m["code"] for m in rise.report()["missing"]] == ["unavailable.gateway"]
    monkeypatch.setattr(up.programs, "words_of", lambda found: ["python", "--gateway-port", "7072", str(found.pid)])
    assert risen(places, monkeypatch).report()["missing"] == []
    assert node_runs.poll() is None


def test_the_tables_of_an_old_database_are_brought_up(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def launch(_places: Places, name: str, _argv: list[str]) -> Program:
        if done == []:
            raise Conflict("the database is at version 01_01, this program needs 02_02", code="schema")
        done.append(name)
        return Program(name, 1, 1)

    def ask(argv: list[str], *, what: str) -> str:
        assert argv[-3] == "migrate"
        done.append(what)
        return json.dumps({"migrated": True, "before": "01_01", "now": "02_02"})

    monkeypatch.setattr(up.programs, "launch", launch)
    monkeypatch.setattr(up.programs, "ask", ask)
    places.site_file.write_text(json.dumps(OLD_SITE))
    rise = risen(places, monkeypatch)
    rise.serve_control()
    assert (done, rise.started) == (["migrate", up.CONTROL], [up.CONTROL])
    assert rise.made == ["tables of the database, from version 01_01 to 02_02"]
    monkeypatch.setattr(up.programs, "launch", refuses_state)
    with pytest.raises(Conflict):
        risen(places, monkeypatch).serve_control()


def refuses_state(*_: object) -> Program:
    raise Conflict("this state is served already", code="served")
