"""The steps of the demo, in the order in which they are told."""

import json
import os
import secrets
import signal
import subprocess
import sysconfig
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stage import STEP_S, Phone, Stage, StepFailed, brief, free_ports

HERE = Path(__file__).resolve().parent
TTL_MS, SLACK_MS, PROMISE_MS = 10_000, 2_000, 5_000
DEBIAN_DOCS = "/usr/share/doc"
ROLES = {"remy": "researcher", "olga": "safety_officer", "otto": "safety_officer", "casey": "on_call",
         "opal": "safety_officer", "oren": "safety_officer", "pia": "partner"}
HOSTILE = ["--tier", "critical", "--restarts", "3", "--pids", "64", "--memory-mb", "256", "--code",
           str(HERE / "hostile.py")]
HOSTILE_COMMAND = ["--", "python3", "/code/hostile.py"]


@dataclass
class Cast:
    """The people, and what one step leaves for the next."""

    stage: Stage
    phones: dict[str, Phone] = field(default_factory=dict)
    request: str = ""
    step_up: str = ""
    run: str = ""
    stop: str = ""
    admitted: str = ""
    docs: str = ""


def rise(cast: Cast) -> str:
    """Two policy authors make keys; one command starts the three programs."""
    stage = cast.stage
    people, nodes, gateway = free_ports()
    for author in ("vera", "hugo"):
        made = stage.must("policy", "keygen", author, "--out", str(stage.folder / f"{author}.key"))
        stage.proof(**{f"bundle signer {author}": made["key_id"]})
    signers = [w for a in ("vera", "hugo") for w in ("--signer", str(stage.folder / f"{a}.key.pub.json"))]
    report = start(cast, ["--people-port", str(people), "--nodes-port", str(nodes), "--gateway-port",
                          str(gateway), "--softhsm", *signers])
    stage.people_url, stage.gateway_url = report["people"], report["gateway"]
    if report["missing"]:
        lacking = report["missing"][0]
        again = "; then: sudo make demo" if lacking["code"] == "unavailable.root" else ""
        raise StepFailed(f"this host cannot run the node: [{lacking['code']}] {lacking['next_step']}{again}")
    stage.proof(made=", ".join(report["made"]), console=report["people"], master_key=report["kek"])
    for program in report["programs"]:
        stage.proof(**{program["name"]: f"pid {program['pid']}, {program['state']}"})
    host = stage.must("doctor", *stage.where)
    stage.proof(layers=", ".join(x["name"] for x in host["layers"] if x["present"]), tiers=", ".join(host["tiers"]))
    return f"{len(report['programs'])} programs ready; this host may run tiers {', '.join(host['tiers'])}"


def start(cast: Cast, options: list[str]) -> dict[str, Any]:
    """Start everything; the documentation to count is that of the environment, or Debian's where a run may not
    be shown the environment (a checkout below /tmp)."""
    stage = cast.stage
    up = ["up", "--detach", "--site", "demo", *options, *stage.where]
    cast.docs = sysconfig.get_paths()["purelib"]
    status, report = stage.ask(*up, "--data-root", cast.docs, wait_s=120)
    if status != 0 and report.get("error", {}).get("code") == "usage.data_root":
        stage.proof(data=f"{brief(report)}; takes {DEBIAN_DOCS}")
        cast.docs = DEBIAN_DOCS
        return stage.must(*up, "--data-root", cast.docs, wait_s=120)
    if status != 0:
        raise StepFailed(f"interlock up ended with {status}: {brief(report)}")
    return report


def enrol(cast: Cast, name: str, link: str, *, first: bool = False) -> dict[str, Any]:
    """One person follows the link: password, authenticator, person key."""
    stage = cast.stage
    for folder in ("people", "phones"):
        (stage.folder / folder).mkdir(mode=0o700, exist_ok=True)
    password, uri = stage.folder / "people" / name, stage.folder / "phones" / name
    with os.fdopen(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        out.write(secrets.token_urlsafe(18) + "\n")
    argv = [str(stage.command), "--json", "--profile", name, "enrol", "-", "--password-file", str(password),
            "--totp-file", str(uri), *(["--name", name] if first else [])]
    with subprocess.Popen(argv, env=stage.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        process.stdin.write(link + "\n")
        process.stdin.flush()
        until = time.monotonic() + 40
        while not (uri.exists() and uri.stat().st_size) and process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        if process.poll() is None and uri.exists():
            cast.phones[name] = Phone(uri.read_text().strip())
            process.stdin.write(cast.phones[name].code() + "\n")
        out_text, err_text = process.communicate(timeout=40)
    if process.returncode != 0:
        raise StepFailed(f"{name} cannot enrol: {out_text[-500:]} {err_text[-300:]}")
    found: dict[str, Any] = json.loads(out_text.splitlines()[-1])
    return found


def people(cast: Cast) -> str:
    """The bootstrap link makes the administrator; he invites the others, each with a link of his own."""
    stage = cast.stage
    first = stage.must("bootstrap", *stage.where)["link"]
    enrol(cast, "ada", first, first=True)
    links = {name: stage.must("invite", name, "--role", role, who="ada")["link"] for name, role in ROLES.items()}
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda item: enrol(cast, *item), links.items()))
    for name in ("ada", *ROLES):
        me = stage.api(name, "/api/whoami")
        stage.proof(**{name: f"roles {', '.join(roles_of(me))}"})
    status, value = stage.ask("enrol", first, "--name", "mallory", "--password-file",
                              str(stage.folder / "people" / "ada"), who="mallory")
    if status == 0:
        raise StepFailed("a one-time link worked twice")
    stage.proof(the_used_bootstrap_link=brief(value))
    return f"{1 + len(links)} people enrolled through one-time links, each with two factors"


def roles_of(me: dict[str, Any]) -> list[str]:
    """Return the role names of a whoami answer."""
    person = me.get("person")
    found = me.get("roles") or (person.get("roles") if isinstance(person, dict) else [])
    return [str(r.get("role", r.get("name"))) if isinstance(r, dict) else str(r) for r in found]


def publish(cast: Cast) -> str:
    """A bundle that nobody signed is refused; the one that two authors signed becomes active."""
    stage = cast.stage
    folder = HERE.parent / "policy"
    stage.must("policy", "check", str(folder))
    bare, signed = stage.folder / "unsigned.bundle", stage.folder / "policy.bundle"
    stage.must("policy", "pack", str(folder), "--out", str(bare))
    stage.refused("untrusted", "policy", "publish", str(bare), who="ada")
    keys = [w for a in ("vera", "hugo") for w in ("--key", str(stage.folder / f"{a}.key"))]
    made = stage.must("policy", "sign", str(folder), *keys, "--out", str(signed))
    stage.must("policy", "publish", str(signed), who="ada")
    active = stage.api("ada", "/api/policy")
    if made["digest"] not in json.dumps(active):
        raise StepFailed(f"another bundle is active: {brief(active)}")
    stage.proof(active_bundle=made["digest"], signed_by=", ".join(made["keys"]))
    return "unsigned bundle refused; bundle signed by two authors is active"


def refusals(cast: Cast) -> str:
    """One refusal of each kind."""
    stage = cast.stage
    plain = ["--", "python3", "-c", "print(1)"]
    stage.refused("denied", "run", *plain, who="casey")
    stage.refused("step_up_required", "run", "--no-wait", *HOSTILE, *HOSTILE_COMMAND, who="remy")
    error = stage.refused("approval_required", "run", "--no-wait", *HOSTILE, *HOSTILE_COMMAND, who="remy",
                          otp=cast.phones["remy"].code())
    cast.request, cast.step_up = error["details"]["request"], error["details"]["step_up"]
    stage.proof(approval_request=cast.request, needed=error["details"].get("needed"),
                given=error["details"].get("given"))
    stage.refused("malformed.tier", "run", "--tier", "galactic", *plain, who="remy")
    return "no role, no second factor, one person for critical, unknown tier: each with code and next step"


def admitted(cast: Cast) -> str:
    """A run over real files of this machine; the officers' approvals of the next step are given meanwhile."""
    stage = cast.stage
    done = stage.must("run", "--code", str(HERE / "count_docs.py"), "--data", f"docs={cast.docs}", "--save",
                      str(stage.folder / "result"), "--", "python3", "/code/count_docs.py", who="remy")
    found = json.loads((stage.folder / "result" / "result.json").read_text())
    file = next(f for f in done["files"] if f["name"] == "result.json")
    stage.proof(run=done["run"],
                documentation=f"{found['files']} files, {found['bytes']} bytes, {found['words']} words",
                sha256_of_all=found["sha256"], result_file=f"{file['bytes']} bytes, {file['digest']}")
    if found["bytes"] < 1_000_000 or done["exit"] != 0 or found["host_can_be_written"]:
        raise StepFailed(f"the run did not do its work: {found}")
    cast.admitted = done["run"]
    why = stage.must("why", done["run"], who="remy")
    decisions = why.get("decisions") or why.get("items") or []
    for one in decisions[:2]:
        stage.proof(decided=f"{one.get('action')}: {one.get('effect')} ({one.get('code')}) by {one.get('rules')}")
    return f"{found['files']} files, {found['bytes']} bytes of documentation counted; exit 0"


def hostile(cast: Cast) -> str:
    """Two officers approve the critical plan; it runs; on-call stops it; the proof is measured."""
    stage = cast.stage
    for officer in ("olga", "otto"):
        vote = stage.must("approve", cast.request, "--reason", "demo", who=officer, code=cast.phones[officer].code())
        stage.proof(**{f"{officer} approves": f"{vote['given']} of {vote['needed']} persons"})
    placed = stage.must("run", "--detach", "--approval", cast.request, "--step-up", cast.step_up, *HOSTILE,
                        *HOSTILE_COMMAND, who="remy")
    cast.run = placed["run"]
    stage.proof(run=cast.run, says=wait_hostile(cast, 1))
    stop = stage.must("stop", f"run:{cast.run}", "--reason", "demo: hostile", who="casey")
    cast.stop = stop["order"]
    for node in stop["nodes"]:
        stage.proof(**{f"node {node['node']}": f"{node['result']} after {node['latency_ms']} ms"})
    took = max([int(n["latency_ms"]) for n in stop["nodes"]] or [PROMISE_MS + 1])
    if stop["state"] != "confirmed" or took > PROMISE_MS:
        raise StepFailed(f"not confirmed in time: {brief(stop)}")
    stage.proof(order=stop["order"], confirmed_after_ms=stop.get("confirmed_ms"))
    return f"order to CONFIRMED in {stop.get('confirmed_ms', took)} ms (promise {PROMISE_MS} ms)"


def wait_hostile(cast: Cast, attempt: int) -> str:
    """Return what the hostile run says once it lives and has filled its limit."""
    import base64

    until = time.monotonic() + 30
    last: dict[str, Any] = {}
    while time.monotonic() < until:
        row = cast.stage.api("remy", f"/api/runs/{cast.run}")
        last = cast.stage.api("remy", f"/api/runs/{cast.run}/output", after=0, wait=0)
        text = base64.b64decode(last.get("data") or "").decode("utf-8", "replace")
        run = row.get("run") if isinstance(row.get("run"), dict) else row
        if run.get("state") in ("ended", "refused", "stopped", "lost") and run.get("attempt") == attempt:
            raise StepFailed(f"the hostile run ended by itself: {brief(row)}")
        if "hostile:" in text and run.get("attempt") == attempt and run.get("state") == "live":
            return text.strip().splitlines()[-1]
        time.sleep(0.2)
    raise StepFailed(f"the hostile run did not come to life: {brief(last)}")


def resume(cast: Cast) -> str:
    """The stop is sticky: a restart is refused until two officers have signed with their own keys."""
    stage = cast.stage
    stage.refused("stopped", "restart", "--detach", cast.run, who="remy")
    asked = stage.must("resume", cast.stop, "--reason", "demo: looked at it", who="casey")
    stage.must("approve", asked["request"], who="olga", code=cast.phones["olga"].code())
    stage.proof(olga="has signed; one signature lifts nothing:")
    stage.refused("stopped", "restart", "--detach", cast.run, who="remy")
    stage.must("approve", asked["request"], who="otto", code=cast.phones["otto"].code())
    cleared = stage.api("casey", f"/api/stops/{cast.stop}")
    if not cleared.get("cleared_by"):
        raise StepFailed(f"the stop is not lifted: {brief(cleared)}")
    stage.proof(otto="has signed", stop_cleared_by=cleared["cleared_by"])
    until = time.monotonic() + 10
    while True:
        status, placed = stage.ask("restart", "--detach", cast.run, who="remy")
        if status == 0 or time.monotonic() > until:
            break
        time.sleep(0.5)
    if status != 0:
        raise StepFailed(f"the restart is still refused: {brief(placed)}")
    return f"restart refused twice, allowed after two signatures: attempt {placed.get('attempt')}"


def lease(cast: Cast) -> str:
    """The control plane dies by SIGKILL. Nobody sends a stop; the second hostile run dies by its lease."""
    stage = cast.stage
    attempt = int(stage.api("remy", f"/api/runs/{cast.run}").get("attempt", 2))
    stage.proof(second_hostile_run=wait_hostile(cast, attempt))
    pid = int(json.loads((stage.runtime / "control_plane.pid").read_text())["pid"])
    before = entry(cast, attempt)
    os.kill(pid, signal.SIGKILL)
    started = int(before["now_ms"])
    stage.proof(killed=f"control plane, pid {pid}", state_before=before["state"],
                lease_left_ms=before["deadline_ms"] - started)
    now: dict[str, Any] = {}
    while True:
        now = entry(cast, attempt)
        took = int(now["now_ms"]) - started
        if now["state"] == "gone" or took > TTL_MS + SLACK_MS + 3_000:
            break
        time.sleep(0.25)
    stage.proof(state_after=now["state"], why=now["why"], gone_after_ms=took)
    if now["state"] != "gone" or took > TTL_MS + SLACK_MS or now["why"] == "ended":
        raise StepFailed(f"the run outlived its lease: {now}")
    report = stage.must("up", "--detach", *stage.where, wait_s=120)
    stage.proof(control_plane_is_back=", ".join(report["started"]) or "it was not gone")
    return f"dead {took} ms after the control plane (limit {TTL_MS + SLACK_MS} ms), by {now['why']}"


def entry(cast: Cast, attempt: int) -> dict[str, Any]:
    """Return the supervisor's own word about the attempt, with its clock."""
    status = cast.stage.program("killswitch", "status", "--json")
    for run in status["runs"]:
        if run["run"] == cast.run and int(run["attempt"]) == attempt:
            return {**run, "now_ms": status["now_ms"]}
    raise StepFailed(f"the supervisor does not know {cast.run} attempt {attempt}: {brief(status)}")


def evidence(cast: Cast) -> str:
    """The export verifies offline with the pinned key; with one flipped byte it does not."""
    stage = cast.stage
    out, key = stage.folder / "evidence.zip", stage.state / "trust" / "ledger.vkey"
    made = stage.must("audit", "export", str(out), who="olga", wait_s=120)
    report = stage.must("audit", "verify", str(out), "--key", str(key))
    stage.proof(export=f"{made['bytes']} bytes, {made['sha256']}", verified=brief(report)[:300])
    bent = stage.folder / "evidence-bent.zip"
    data = bytearray(out.read_bytes())
    data[middle_of_largest(out)] ^= 1
    bent.write_bytes(data)
    status, value = stage.ask("audit", "verify", str(bent), "--key", str(key))
    if status == 0 or value.get("status") == "ok":
        raise StepFailed("a flipped byte was not noticed")
    stage.proof(one_flipped_byte=brief(value)[:300])
    said = value.get("status") or value["error"]["code"]
    return f"export verifies ({report.get('status')}); one flipped byte: {said}"


def middle_of_largest(archive: Path) -> int:
    """Return the offset of a byte in the middle of the largest member's data."""
    with zipfile.ZipFile(archive) as found:
        largest = max(found.infolist(), key=lambda i: i.compress_size)
    head = largest.header_offset
    data = archive.read_bytes()
    sizes = int.from_bytes(data[head + 26:head + 28], "little") + int.from_bytes(data[head + 28:head + 30], "little")
    return head + 30 + sizes + largest.compress_size // 2


FIRST_STEPS: list[tuple[str, Callable[[Cast], str]]] = [
    ("One command starts control plane, kill supervisor and node", rise),
    ("Eight people enrol through one-time links", people),
    ("Policy comes from its authors, not from the server", publish),
    ("Refusals: code, reason, next step", refusals),
    ("An admitted run over real files", admitted),
    ("A hostile run, approved at tier critical, is stopped", hostile),
    ("The stop is sticky until two officers resume", resume),
    ("The control plane is killed; the lease ends the run", lease),
]
LAST_STEPS: list[tuple[str, Callable[[Cast], str]]] = [
    ("The evidence verifies offline; one flipped byte does not", evidence),
]
assert STEP_S == 30
