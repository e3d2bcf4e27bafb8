"""Real programs for the tests: a supervisor and a node on short folders, against the simulator."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import new_id
from interlock.canon import digest_bytes
from interlock.order import Dataset, Labels, LaunchOrder, Plan
from interlock.signed import public_text
from interlock.tier import PROFILES, Tier
from killswitch.client import Supervisor
from policy import bundle
from runners.folders import Folders
from runners.join import join
from sandbox.cgroup import Group
from tests.runners.simulator import Simulator, Site

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "policy"
BROKER_UID = "59990"
# a part of the range for each test process, so that tests side by side on one host do not meet
UIDS = f"{60100 + os.getpid() % 9 * 100}-{60199 + os.getpid() % 9 * 100}"


def give_bundle(site: Site) -> None:
    """Sign the example policy with two signers, pin both, make it active."""
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    archive = bundle.pack(EXAMPLES, version=1)
    for key in keys:
        archive = bundle.sign_archive(archive, key)
    site.bundle = (1, archive)
    site.signers = [{"name": f"s{i}", "key": public_text(k.public_key())} for i, k in enumerate(keys)]
    site.roles = [{"person": "ada", "tenant": "lab", "role": "researcher"}]


def order(site: Site, *argv: str, run: str = "", attempt: int = 1, epoch: int | None = None, owner: str = "ada",
          facts: dict[str, Any] | None = None, tier: Tier = Tier.NONE, lease_ms: int = 0, **plan: Any) -> LaunchOrder:
    """Return a launch order for the site's node; `lease_ms` shortens lease and absence limit."""
    run = run or new_id("run")
    profile = PROFILES[tier]
    made = Plan(argv, tier, "lab", **plan)
    labels = Labels("lab", owner, owner, run, site.node, tier)
    told = {"mfa_age_ms": 1000, "mfa_bound": made.digest(), "approvals": 2} if facts is None else facts
    return LaunchOrder(new_id("launch"), run, attempt, labels, made, site.epoch if epoch is None else epoch,
                       lease_ms or profile.lease_ms, lease_ms or profile.absent_ms, told)


def code(site: Site, name: str, text: str) -> tuple[tuple[str, str], ...]:
    data = text.encode()
    site.code[digest_bytes(data)] = data
    return ((name, digest_bytes(data)),)


def dataset(name: str, path: Path) -> tuple[Dataset, ...]:
    return (Dataset(name, str(path)),)


class Program:
    """One of our programs in a process of its own; `ready` is its ready line."""

    def __init__(self, log: Path, *words: str, wait_s: float = 60.0) -> None:
        self.log = log
        self._err = log.open("ab")
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-m", *words], stdout=subprocess.PIPE, stderr=self._err, cwd="/",
        )
        try:
            self.ready = self._await_ready(wait_s)
        except BaseException:
            self.end()
            raise

    def _await_ready(self, wait_s: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        until = time.monotonic() + wait_s
        line = b""
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                raise AssertionError(f"no ready line; {self.said()}")
            data = os.read(self.process.stdout.fileno(), 65536)
            if not data:
                raise AssertionError(f"it ended; {self.said()}")
            line += data
        return json.loads(line.splitlines()[0])

    def said(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    def end(self, number: int = signal.SIGTERM) -> int:
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._err.close()
        return self.process.returncode


def supervisor(host: Folders) -> Program:
    return Program(host.state / "supervisor.log", "killswitch", "watch", "--state", str(host.state),
                   "--runtime", str(host.runtime))


def node(host: Folders, *words: str) -> Program:
    return Program(host.state / "node.log", "runners", "serve", "--state", str(host.state),
                   "--runtime", str(host.runtime), "--broker-user", BROKER_UID, "--uids", UIDS, *words)


class Lab:
    """A joined host with both programs, and the site that they talk to. `data` is a data root."""

    def __init__(self, short: Path, probes: Path) -> None:
        self.site = Site(short / "site")
        give_bundle(self.site)
        self.simulator = Simulator(self.site)
        self.host = Folders(short / "s", short / "r")
        self.data = Path(tempfile.mkdtemp(prefix="ilr", dir="/srv"))  # nothing below /tmp is shown to a run
        self.data.chmod(0o755)
        self._probes = probes
        self.supervisor: Program | None = None
        self.node: Program | None = None
        try:
            join(self.simulator.join_file(short / "join.json"), self.host)
            self.supervisor = supervisor(self.host)
            self.start_node()
        except BaseException:
            self.end()
            raise

    def start_node(self) -> None:
        """Start the node; the probes of this boot are asked once for all tests."""
        kept = self.host.node / "probes.json"
        if self._probes.exists() and not kept.exists():
            shutil.copy(self._probes, kept)
        self.node = node(self.host, "--data-root", str(self.data))
        shutil.copy(kept, self._probes)

    def launch(self, *argv: str, **plan: Any) -> LaunchOrder:
        """Hand out a launch order."""
        made = order(self.site, *argv, **plan)
        self.site.launch(made)
        return made

    def over(self, made: LaunchOrder, seconds: float = 20.0) -> dict[str, Any]:
        """Return the last state report of the attempt."""
        found: dict[str, Any] = self.site.wait_for(lambda: next(
            (s for s in self.site.states if (s["run"], s["attempt"]) == (made.run, made.attempt)
             and s["state"] in ("ended", "refused")), None), seconds)
        return found

    def ended(self, made: LaunchOrder, seconds: float = 20.0) -> dict[str, Any]:
        """Return the outcome of an attempt that was not refused."""
        final = self.over(made, seconds)
        assert final["state"] == "ended", (final, self.node and self.node.said())
        outcome: dict[str, Any] = final["outcome"]
        return outcome

    def live(self, made: LaunchOrder) -> None:
        """Wait until the attempt is live."""
        self.site.wait_for(lambda: self.site.state_of(made.run, "live"))

    def said(self, made: LaunchOrder) -> str:
        """Return the output so far."""
        return self.site.output.get(f"{made.run}.{made.attempt}", b"").decode(errors="replace")

    def pids(self, made: LaunchOrder) -> list[int]:
        """Return the processes of the attempt, as its control group says."""
        client = Supervisor(self.host.socket)
        for row in client.ask("status")["runs"]:
            if row["run"] == made.run and row["attempt"] == made.attempt and row["state"] != "gone":
                return Group(f"{made.run}.{made.attempt}", groups_of(self.host, made)).pids()
        return []

    def end(self) -> None:
        """End both programs and the site."""
        for program in (self.node, self.supervisor):
            if program is not None:
                program.end()
        self.simulator.away()
        shutil.rmtree(self.data)


def groups_of(host: Folders, made: LaunchOrder) -> dict[str, str]:
    """Return the control groups of an attempt from the supervisor's note about its tree."""
    paths = json.loads((host.supervisor / "tree.json").read_bytes())["paths"]
    return {name: f"{path}/runs/{made.run}.{made.attempt}" for name, path in paths.items()}
