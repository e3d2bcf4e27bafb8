"""A host with the real supervisor as a process, real control groups and real hostile processes."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from killswitch.client import Supervisor
from killswitch.verify import state_of
from tests.killswitch.site import Site, short_folder

SPAWN = Path(__file__).with_name("spawn.py")
HOSTILE = """
import os, signal, sys, time
for n in range(1, 65):
    try: signal.signal(n, signal.SIG_IGN)
    except (OSError, ValueError): pass
def daemon():
    try:
        if os.fork(): return
    except OSError: return
    os.setsid()
    while True:
        try:
            if os.fork() == 0:
                os.setsid()
        except OSError:
            time.sleep(0.005)
for _ in range(3): daemon()
while True: time.sleep(1)
"""
SLEEP = "import time\nwhile True: time.sleep(1)\n"


@dataclass
class Started:
    """A spawned run: its init's pid in our view, our copies of nothing else."""

    pid: int
    groups: dict[str, str]
    page: Path

    def pids(self) -> list[int]:
        try:
            return [int(p) for p in Path(self.groups["unified"], "cgroup.procs").read_text().split()]
        except OSError:
            return []

    def alive(self) -> list[int]:
        return [p for p in self.pids() if state_of(p) not in ("", "Z", "X")]


class Host:
    """One state folder, one supervisor at a time."""

    def __init__(self, site: Site | None = None) -> None:
        self.folder = short_folder()
        self.state, self.runtime = self.folder / "s", self.folder / "r"
        self.site = site or Site()
        self.site.join(self.state)
        self.process: subprocess.Popen[str] | None = None
        self.forkers: list[subprocess.Popen[str]] = []

    def command(self, *words: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-I", "-m", "killswitch", words[0], "--state", str(self.state), "--runtime",
                str(self.runtime), *words[1:]]
        return subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False, cwd="/")

    def stop(self, *words: str) -> tuple[int, dict[str, Any]]:
        done = self.command("stop", *words, "--json")
        return done.returncode, json.loads(done.stdout)

    def watch(self, *words: str) -> None:
        argv = [sys.executable, "-I", "-m", "killswitch", "watch", "--state", str(self.state), "--runtime",
                str(self.runtime), *words]
        with open(self.folder / "log", "a") as log:
            self.process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, cwd="/")
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 15)
        line = self.process.stdout.readline() if ready else ""
        assert '"ready"' in line, (self.folder / "log").read_text()

    @property
    def ask(self) -> Any:
        return Supervisor(self.runtime / "supervisor.sock").ask

    def beat(self, **over: Any) -> dict[str, Any]:
        """Carry one honest heartbeat (bent by `over`) and return what was applied."""
        beats = self.ask("beats")
        return self.ask("answer", answer=self.site.answer(beats, **over))["applied"]

    def admit(self, run: str = "run_1", attempt: int = 1, **over: Any) -> dict[str, Any]:
        return self.ask("admit", launch=self.site.launch(run, attempt, **over))

    def spawn(self, admitted: dict[str, Any], code: str = SLEEP, uid: int = 0) -> Started:
        """Put run init and a command into the group and hand pidfd and pipe to the supervisor."""
        reading, writing = os.pipe()
        files = [f"{p}/cgroup.procs" for p in admitted["groups"].values()]
        argv = [sys.executable, "-I", "-S", str(SPAWN), str(reading), admitted["deadline_page"], str(uid), code, *files]
        with open(self.folder / "log", "a") as log:  # never our own stdout: a survivor would hold it open
            forker = subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=log, text=True, pass_fds=[reading], cwd="/"
            )
        self.forkers.append(forker)
        os.close(reading)
        assert forker.stdout is not None
        pid = int(forker.stdout.readline())
        # The real launcher tells of a run init that reported itself; this one may not have its uid yet.
        wait_for(lambda: f"Uid:\t{uid}\t" in Path(f"/proc/{pid}/status").read_text())
        pidfd = os.pidfd_open(pid)
        try:
            self.ask("spawned", run=admitted["run"], attempt=admitted["attempt"], fds=[pidfd, writing])
        finally:
            os.close(pidfd)
            os.close(writing)
        return Started(pid, admitted["groups"], Path(admitted["deadline_page"]))

    def live(self, run: str = "run_1", code: str = SLEEP, uid: int = 0, **over: Any) -> Started:
        """Bring one attempt up to LIVE and return it with living processes."""
        self.beat()
        started = self.spawn(self.admit(run, **over), code, uid)
        lease_ms = over.get("lease_ms", 10_000)
        beats = self.ask("beats")
        mine = [self.site.lease(b, duration_ms=lease_ms if b["run"] == run else 10_000) for b in beats["beats"]]
        self.ask("answer", answer=self.site.answer(beats, leases=mine))
        assert self.row(run)["state"] == "live"
        wait_for(lambda: len(started.alive()) >= 2)
        return started

    def row(self, run: str = "run_1") -> dict[str, Any]:
        return next(r for r in self.ask("status")["runs"] if r["run"] == run)

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill_supervisor(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait(10)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def end(self) -> int:
        """End the supervisor as a service manager would; return its exit status."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.terminate()
        status = self.process.wait(15)
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None
        return status

    def clean(self) -> None:
        if self.process is None:
            with suppress(AssertionError, OSError):
                self.watch()  # its sweep ends what a test left, its end removes the tree
        if self.process is not None:
            self.end()
        for forker in self.forkers:
            forker.wait(10)
            assert forker.stdout is not None
            forker.stdout.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def wait_for(condition: Any, seconds: float = 5.0) -> float:
    """Wait until `condition` holds; return the seconds that took; fail after `seconds`."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "waited in vain"
        time.sleep(0.01)
    return time.monotonic() - begin
