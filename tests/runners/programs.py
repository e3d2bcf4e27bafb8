"""Real programs for the tests: a supervisor and a node on short folders, against the simulator."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from interlock.call import new_id
from interlock.canon import digest_bytes
from interlock.order import Dataset, Labels, LaunchOrder, Plan
from interlock.signed import public_text
from interlock.tier import PROFILES, Tier
from policy import bundle
from runners.folders import Folders
from tests.runners.simulator import Site

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "policy"
BROKER_UID = "59990"


def give_bundle(site: Site) -> None:
    """Sign the example policy with two signers, pin both, make it active."""
    keys = [Ed25519PrivateKey.generate() for _ in range(2)]
    archive = bundle.pack(EXAMPLES, version=1)
    for key in keys:
        archive = bundle.sign_archive(archive, key)
    site.bundle = (1, archive)
    site.signers = [{"name": f"s{i}", "key": public_text(k.public_key())} for i, k in enumerate(keys)]
    site.roles = [{"person": "ada", "tenant": "lab", "role": "researcher"}]


def order(site: Site, *argv: str, run: str = "", attempt: int = 1, epoch: int | None = None,
          facts: dict[str, Any] | None = None, tier: Tier = Tier.NONE, **plan: Any) -> LaunchOrder:
    """Return a launch order of ada's for the site's node."""
    run = run or new_id("run")
    profile = PROFILES[tier]
    made = Plan(argv, tier, "lab", **plan)
    labels = Labels("lab", "ada", "ada", run, site.node, tier)
    told = {"mfa_age_ms": 1000, "mfa_bound": made.digest(), "approvals": 2} if facts is None else facts
    return LaunchOrder(new_id("launch"), run, attempt, labels, made, site.epoch if epoch is None else epoch,
                       profile.lease_ms, profile.absent_ms, told)


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
                   "--runtime", str(host.runtime), "--broker-user", BROKER_UID, *words)
