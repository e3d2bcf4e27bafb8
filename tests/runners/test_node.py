"""The whole way: real supervisor, real node, real sandbox, a simulated control plane."""

import base64
import json
import os
import re
import signal
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from audit.marks import verify as verify_marks
from interlock.call import new_id
from interlock.canon import digest_bytes, parse
from interlock.order import Labels
from runners import identity
from tests.runners import programs
from tests.runners.conftest import needs_root
from tests.runners.programs import Lab

pytestmark = [pytest.mark.root, needs_root]


def test_a_command_runs_and_everything_about_it_arrives(lab: Lab):
    made = lab.launch("sh", "-c", "echo out; echo err >&2; id -u; mkdir out; echo r > out/result.txt; exit 3")
    final = lab.over(made)
    assert final["state"] == "ended"
    assert final["outcome"] == {
        "exit": 3, "signal": None, "timed_out": False, "truncated_bytes": 0, "result": "confirmed", "why": "ended",
    }
    assert [s["state"] for s in lab.site.states if s["run"] == made.run] == ["admitted", "live", "ended"]
    first, second, uid = lab.said(made).split()
    assert (first, second) == ("out", "err")
    assert 60100 <= int(uid) <= 60999
    assert lab.site.files[f"{made.run}.1/result.txt"] == b"r\n"


def test_its_records_are_shipped_in_order_with_marks(lab: Lab):
    made = lab.launch("true")
    lab.over(made)
    wanted = ["run.intent", "gate.decided", "run.started", "run.ended"]
    found = lab.site.wait_for(lambda: (
        kinds := [e["type"] for e in lab.site.events() if e.get("run") == made.run]
    ) == wanted and kinds)
    assert found == wanted
    started = next(e for e in lab.site.events() if e["type"] == "run.started" and e["run"] == made.run)
    decided = next(e for e in lab.site.events() if e["type"] == "gate.decided" and e["run"] == made.run)
    assert started["facts"]["record"] == decided["id"]  # the permit that started it names its record
    assert decided["facts"]["decision"]["effect"] == "allow"
    mark = lab.site.wait_for(lambda: lab.site.marks and lab.site.marks[-1])
    body = base64.b64decode(mark["body"])
    certificate = identity.read_certificate((lab.host.node / "node.pem").read_bytes())
    public = certificate.public_key()
    assert isinstance(public, ec.EllipticCurvePublicKey)
    assert verify_marks(public, body, base64.b64decode(mark["sig"]))
    streams = {row["stream"]: row["seq"] for row in parse(body)["streams"]}
    assert any(name.startswith("launcher-") for name in streams)
    assert any(name.startswith("broker-") for name in streams)


def test_nothing_is_left_after_it(lab: Lab):
    made = lab.launch("sh", "-c", "(setsid sleep 300 &) ; echo done", guest=True)
    lab.over(made)
    lab.site.wait_for(lambda: not (lab.host.work / f"{made.run}.1").exists())
    assert not lab.host.run(made.run, 1).exists()
    assert f"{made.run}.1" not in Path("/proc/self/mounts").read_text()
    assert lab.pids(made) == []


def test_a_signal_is_reported_as_one(lab: Lab):
    outcome = lab.ended(lab.launch("sh", "-c", "kill -9 $$"))
    assert (outcome["exit"], outcome["signal"]) == (None, 9)


def test_a_command_that_does_not_exist_ends_with_127(lab: Lab):
    made = lab.launch("no-such-command")
    assert lab.ended(made)["exit"] == 127
    assert "no-such-command" in lab.said(made)


def test_code_files_come_by_digest(lab: Lab):
    files = programs.code(lab.site, "hello.py", "print('from code')\n")
    made = lab.launch("python3", "/code/hello.py", code=files)
    assert lab.ended(made)["exit"] == 0
    assert lab.said(made) == "from code\n"


def test_refuses_when_a_code_file_has_another_digest(lab: Lab):
    digest = digest_bytes(b"what was approved")
    lab.site.code[digest] = b"something else"
    final = lab.over(lab.launch("python3", "/code/x.py", code=(("x.py", digest),)))
    assert (final["state"], final["error"]["code"]) == ("refused", "untrusted.digest")


def test_datasets_are_read_only_below_a_data_root(lab: Lab):
    (lab.data / "set").mkdir(exist_ok=True)
    (lab.data / "set" / "a.txt").write_text("rows\n")
    made = lab.launch("sh", "-c", "cat /data/set/a.txt; touch /data/set/b",
                      datasets=programs.dataset("set", lab.data / "set"))
    assert lab.ended(made)["exit"] == 1
    assert "rows" in lab.said(made)
    assert "Read-only" in lab.said(made)
    assert sorted(os.listdir(lab.data / "set")) == ["a.txt"]
    decided = [e for e in lab.site.wait_for(lambda: [
        e for e in lab.site.events() if e.get("run") == made.run and e["type"] == "gate.decided"
    ] or None)]
    assert {e["facts"]["call"]["action"] for e in decided} == {"read_data", "launch"}


@pytest.mark.parametrize("path", ["/etc", "link", "../../tmp"])
def test_refuses_when_a_dataset_is_outside_the_data_roots(lab: Lab, path: str):
    if path == "link":
        (lab.data / "link").unlink(missing_ok=True)
        (lab.data / "link").symlink_to("/etc")
    made = lab.launch("true", datasets=programs.dataset("x", lab.data / path))
    final = lab.over(made)
    assert (final["state"], final["error"]["code"]) == ("refused", "denied.data_root")


def test_refuses_when_the_person_has_no_role(lab: Lab):
    made = lab.launch("true", owner="mallory")
    final = lab.over(made)
    assert (final["state"], final["error"]["code"]) == ("refused", "denied.no_match")
    event = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e.get("run") == made.run and e["type"] == "gate.decided"), None))
    assert event["facts"]["decision"]["effect"] == "deny"
    assert not any(e["type"] == "run.started" and e["run"] == made.run for e in lab.site.events())


def test_refuses_when_a_factor_is_missing_for_tier_high(lab: Lab):
    from interlock.tier import Tier

    made = lab.launch("true", tier=Tier.HIGH, facts={"mfa_age_ms": None, "mfa_bound": "", "approvals": 0})
    assert lab.over(made)["error"]["code"] == "step_up_required"
    assert lab.over(lab.launch("true", tier=Tier.HIGH))["state"] == "ended"  # control


def test_refuses_when_a_stranger_signed_the_launch_order(lab: Lab):
    made = programs.order(lab.site, "true")
    signed = lab.site.launch(made, Ed25519PrivateKey.generate())
    event = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e["type"] == "incident.raised"
         and e["facts"].get("refused") == "untrusted.signature"), None))
    assert event["facts"]["code"] == "launch_order"
    assert lab.site.state_of(made.run, "admitted") is None
    lab.site.launches.remove(signed)


def test_output_is_bounded_and_the_rest_is_counted(lab: Lab):
    made = lab.launch("sh", "-c", "head -c 3000000 /dev/zero", output_mb=1)
    outcome = lab.ended(made)
    assert outcome["truncated_bytes"] == 3_000_000 - (1 << 20)
    assert len(lab.site.output[f"{made.run}.1"]) == 1 << 20


def test_hostile_files_stay_inside(lab: Lab):
    script = (
        "mkdir out; cd out; echo ok > ok.txt; ln -s /etc/passwd link.txt; mkfifo pipe.txt; mkdir sub;"
        "echo x > .hidden; head -c 2000000 /dev/zero > big.bin"
    )
    made = lab.launch("sh", "-c", script, output_mb=1)
    assert lab.ended(made)["exit"] == 0
    assert [n for n in lab.site.files if n.startswith(made.run)] == [f"{made.run}.1/ok.txt"]
    ended = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e["type"] == "run.ended" and e["run"] == made.run), None))
    assert {s["name"] for s in ended["facts"]["skipped"]} == {".hidden", "big.bin", "link.txt", "pipe.txt", "sub"}


GUEST = """
import sys
from interlock import run_id, step
from interlock import wire
step(1, loss_micro=5)
print(run_id(), wire.ask("status")["state"])
"""


def test_a_guest_reports_steps_through_the_broker(lab: Lab):
    files = programs.code(lab.site, "train.py", GUEST)
    made = lab.launch("python3", "/code/train.py", code=files, guest=True)
    assert lab.ended(made)["exit"] == 0, lab.said(made)
    assert lab.said(made).split() == [made.run, "live"]
    event = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e["type"] == "run.step" and e["run"] == made.run), None))
    assert event["facts"] == {"attempt": 1, "n": 1, "steps": 1, "metrics": {"loss_micro": 5}}


def test_no_guest_socket_without_asking_for_it(lab: Lab):
    made = lab.launch("sh", "-c", "ls /run/interlock 2>&1; echo end")
    lab.over(made)
    assert "broker.sock" not in lab.said(made)


def test_the_broker_runs_under_its_own_uid_without_privileges(lab: Lab):
    assert lab.node is not None
    status = Path(f"/proc/{lab.node.ready['broker_pid']}/status").read_text()
    assert re.search(r"^Uid:\s+59990\s+59990\s+59990\s+59990$", status, re.M)
    assert re.search(r"^CapEff:\s+0+$", status, re.M)
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.M)
    words = Path(f"/proc/{lab.node.ready['broker_pid']}/cmdline").read_text()
    environment = Path(f"/proc/{lab.node.ready['broker_pid']}/environ").read_bytes()
    assert "--key" in words  # a descriptor's number; the key itself is nowhere
    assert b"permit" not in environment


def test_the_launcher_listens_on_no_network_address(lab: Lab):
    assert lab.node is not None
    inodes = {os.readlink(f"/proc/{lab.node.process.pid}/fd/{fd}") for fd in os.listdir(
        f"/proc/{lab.node.process.pid}/fd") if os.path.lexists(f"/proc/{lab.node.process.pid}/fd/{fd}")}
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":  # LISTEN
                assert f"socket:[{fields[9]}]" not in inodes


def test_facts_name_layers_tiers_and_roots(lab: Lab):
    facts = lab.site.wait_for(lambda: lab.site.facts and lab.site.facts[-1])
    assert facts["tiers"] == ["none", "high", "critical"]
    assert facts["data_roots"] == [str(lab.data)]
    assert all(p["probes"]["failed"] == 0 and p["probes"]["total"] >= 15 for p in facts["profiles"])
    assert any(layer["name"] and layer["present"] for layer in facts["layers"])


def test_the_same_launch_order_runs_once(lab: Lab):
    made = lab.launch("sh", "-c", "echo once")
    lab.over(made)
    again = lab.site.launch(made)  # handed out again, byte for byte
    lab.site.states[:] = [s for s in lab.site.states if s["run"] != made.run]
    lab.site.wait_for(lambda: lab.site.bodies.append(("x", None)) or len(lab.site.bodies) > 5)
    other = lab.launch("true")
    lab.over(other)
    assert lab.said(made) == "once\n"
    assert lab.site.state_of(made.run, "admitted") is None
    lab.site.launches.remove(again)
    lab.site.launches[:] = [s for s in lab.site.launches if s.body()["run"] != made.run]


def test_labels_of_another_tenant_get_no_role(lab: Lab):
    made = programs.order(lab.site, "true")
    changed = type(made)(made.id, made.run, 1, Labels("other", "ada", "ada", made.run, "node-1", made.plan.tier),
                         made.plan, made.epoch, made.lease_ms, made.absent_ms, made.facts)
    lab.site.launch(changed)
    event = lab.site.wait_for(lambda: next(
        (e for e in lab.site.events() if e["type"] == "incident.raised"
         and e["facts"].get("refused") == "malformed.launch_order"), None))
    assert event
    lab.site.launches[:] = [s for s in lab.site.launches if s.body()["run"] != made.run]


def test_the_environment_holds_interlock_and_nothing_else_of_ours(lab: Lab):
    code = (
        "import os, json, importlib.util as u; print(json.dumps([os.environ.get('INTERLOCK_RUN'),"
        "[n for n in ('interlock','policy','audit','kms','sandbox','killswitch','runners','control_plane')"
        " if u.find_spec(n)], sorted(k for k in os.environ if 'KEY' in k or 'SECRET' in k)]))"
    )
    made = lab.launch("python3", "-c", code)
    lab.over(made)
    assert json.loads(lab.said(made)) == [made.run, ["interlock"], []]


def test_two_runs_have_two_uids(lab: Lab):
    both = [lab.launch("sh", "-c", "id -u; sleep 1", run=new_id("run")) for _ in range(2)]
    for made in both:
        lab.over(made)
    assert len({lab.said(made) for made in both}) == 2


def test_a_dead_broker_is_replaced_and_its_run_goes_on(lab: Lab):
    assert lab.node is not None
    files = programs.code(lab.site, "late.py", "import time, interlock\nprint('up', flush=True)\ntime.sleep(4)\n"
                          "try: interlock.step(1)\nexcept interlock.errors.Unavailable as e: print(e.code)\n")
    made = lab.launch("python3", "/code/late.py", code=files, guest=True)
    lab.site.wait_for(lambda: "up" in lab.said(made))
    os.kill(int(lab.node.ready["broker_pid"]), signal.SIGKILL)
    lab.site.wait_for(lambda: any(
        e["type"] == "incident.raised" and e["facts"].get("code") == "broker" for e in lab.site.events()))
    assert lab.ended(made)["exit"] == 0
    assert lab.said(made).split() == ["up", "unavailable.broker"]
    files = programs.code(lab.site, "train.py", GUEST)
    again = lab.launch("python3", "/code/train.py", code=files, guest=True)
    assert lab.ended(again)["exit"] == 0, lab.said(again)
