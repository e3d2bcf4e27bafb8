"""A whole site on this machine through the ordinary commands: five people, signed policy, three programs.

The stories act as users do: the `interlock` command and HTTP, never an import of a room.
"""

import base64
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pyotp

ROOT = Path(__file__).resolve().parents[2]
DOCS = Path("/usr/share/doc")  # real files that every Debian has, wherever this checkout lies
COMMAND = str(Path(sys.executable).parent / "interlock")
# A code works once, so each hostile run has a crew of its own: who asks, and the two officers who approve.
# The first crew's officers are the first two to enrol: theirs are the person keys that nodes pin.
CREWS = (("remy", "olga", "otto"), ("rhea", "opal", "oren"), ("rolf", "odo", "oona"))
ROLES = {"remy": "researcher", "olga": "safety_officer", "otto": "safety_officer", "casey": "on_call",
         "rhea": "researcher", "rolf": "researcher",
         **dict.fromkeys(("opal", "oren", "odo", "oona"), "safety_officer"), "pia": "partner"}
HOSTILE = ROOT / "examples" / "demo" / "hostile.py"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Lab:
    """`folder` holds everything; `phones` the TOTP secrets; `used` the last time step of each."""

    folder: Path
    people_url: str = ""
    gateway_url: str = ""
    phones: dict[str, str] = field(default_factory=dict)
    used: dict[str, int] = field(default_factory=dict)

    @property
    def state(self) -> Path:
        return self.folder / "s"

    @property
    def runtime(self) -> Path:
        return self.folder / "r"

    @property
    def where(self) -> list[str]:
        return ["--state", str(self.state), "--runtime", str(self.runtime)]

    # --- commands ----------------------------------------------------------------------------------
    def ask(self, *words: str, who: str = "", code: str = "", stdin: str | None = None, wait: float = 90
            ) -> tuple[int, dict[str, Any]]:
        """Run `interlock --json …`; return exit status and the last JSON object."""
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8",
                       "INTERLOCK_HOME": str(self.folder / "home"), "INTERLOCK_URL": self.people_url}
        if code:
            environment["INTERLOCK_CODE"] = code
        done = subprocess.run([COMMAND, "--json", *(["--profile", who] if who else []), *words], env=environment,
                              text=True, capture_output=True, timeout=wait, check=False, input=stdin, cwd="/")
        return done.returncode, last_object(done.stdout) or {"stdout": done.stdout, "stderr": done.stderr}

    def must(self, *words: str, **more: Any) -> dict[str, Any]:
        status, value = self.ask(*words, **more)
        assert status == 0, (words, status, value)
        return value

    def refused(self, expected: str, /, *words: str, **more: Any) -> dict[str, Any]:
        status, value = self.ask(*words, **more)
        assert status != 0, (words, value)
        error = value["error"]
        assert isinstance(error, dict)
        assert error["code"].startswith(expected), error
        assert error["message"]
        return error

    def program(self, module: str, *words: str) -> tuple[int, dict[str, Any]]:
        done = subprocess.run([sys.executable, "-I", "-m", module, *words, *self.where], text=True, capture_output=True,
                              timeout=60, check=False, cwd="/")
        return done.returncode, last_object(done.stdout) or last_object(done.stderr)

    def supervisor(self) -> dict[str, Any]:
        status, value = self.program("killswitch", "status", "--json")
        assert status == 0, value
        return value

    def api(self, who: str, path: str, **params: Any) -> dict[str, Any]:
        kept = json.loads((self.folder / "home" / "profiles" / who / "credentials.json").read_text())
        answer = httpx.get(self.people_url + path, params=params, timeout=40, trust_env=False,
                           headers={"authorization": f"Bearer {kept['session']}"})
        assert answer.status_code == 200, answer.text
        value = answer.json()
        assert isinstance(value, dict)
        return value

    def code(self, who: str) -> str:
        """Return a code that this person has not used: the step before while it is good, else the next to come."""
        totp = pyotp.TOTP(self.phones[who])
        while True:
            step, last, left = int(time.time() // 30), self.used.get(who, 0), 30 - time.time() % 30
            pick = step - 1 if last < step - 1 and left > 6 else step
            if pick > last:
                self.used[who] = pick
                return str(totp.generate_otp(pick))
            time.sleep(0.5)

    # --- beginning and end -------------------------------------------------------------------------
    def up(self, **more: Any) -> dict[str, Any]:
        found = self.must("up", "--detach", *self.where, **more, wait=120)
        assert not found["missing"], found["missing"]
        self.people_url = found["people"]
        return found

    def rise(self) -> None:
        """Two authors, three programs, five people, one signed bundle."""
        for author in ("vera", "hugo"):
            self.must("policy", "keygen", author, "--out", str(self.folder / f"{author}.key"))
        signers = [w for a in ("vera", "hugo") for w in ("--signer", str(self.folder / f"{a}.key.pub.json"))]
        found = self.must("up", "--detach", "--site", "demo", "--people-port", str(free_port()), "--nodes-port",
                          str(free_port()), "--gateway-port", str(free_port()), "--softhsm", "--data-root", str(DOCS),
                          *signers, *self.where, wait=120)
        assert not found["missing"], found["missing"]
        self.people_url, self.gateway_url = found["people"], found["gateway"]
        self.enrol("ada", self.must("bootstrap", *self.where)["link"], first=True)
        bundle = self.folder / "bundle"
        keys = [w for a in ("vera", "hugo") for w in ("--key", str(self.folder / f"{a}.key"))]
        self.must("policy", "sign", str(ROOT / "examples" / "policy"), *keys, "--out", str(bundle))
        self.must("policy", "publish", str(bundle), who="ada")
        for name, role in ROLES.items():
            self.enrol(name, self.must("invite", name, "--role", role, who="ada")["link"])

    def enrol(self, name: str, link: str, *, first: bool = False) -> None:
        password, uri = self.folder / f"{name}.password", self.folder / f"{name}.totp"
        with os.fdopen(os.open(password, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(f"a long sentence that {name} keeps\n")
        words = [COMMAND, "--json", "--profile", name, "enrol", "-", "--password-file", str(password), "--totp-file",
                 str(uri), *(["--name", name] if first else [])]
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "LANG": "C.UTF-8",
                       "INTERLOCK_HOME": str(self.folder / "home"), "INTERLOCK_URL": self.people_url}
        with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True, cwd="/") as process:
            assert process.stdin is not None
            process.stdin.write(link + "\n")
            process.stdin.flush()
            until = time.monotonic() + 40
            while not (uri.exists() and uri.stat().st_size) and process.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
            assert uri.exists(), process.stdout.read() if process.stdout and process.poll() is not None else "no secret"
            parsed = pyotp.parse_uri(uri.read_text().strip())
            self.phones[name] = parsed.secret
            process.stdin.write(self.code(name) + "\n")
            out_text, _ = process.communicate(timeout=40)
        assert process.returncode == 0, out_text

    def down(self) -> None:
        self.ask("down", *self.where)
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- runs --------------------------------------------------------------------------------------
    def hostile(self, crew: int, restarts: int = 2) -> str:
        """Start the hostile command at tier critical with two officers' approval; return the run once it lives."""
        owner, *officers = CREWS[crew]
        words = ["--tier", "critical", "--restarts", str(restarts), "--pids", "48", "--memory-mb", "256", "--code",
                 str(HOSTILE)]
        command = ["--", "python3", "/code/hostile.py"]
        asked = self.refused("approval_required", "run", "--no-wait", *words, *command, who=owner,
                             code=self.code(owner))["details"]
        for officer in officers:
            self.must("approve", asked["request"], who=officer, code=self.code(officer))
        placed = self.must("run", "--detach", "--approval", asked["request"], "--step-up", asked["step_up"], *words,
                           *command, who=owner)
        self.alive(placed["run"], 1)
        return str(placed["run"])

    def alive(self, run: str, attempt: int, wait: float = 30) -> None:
        """Wait until the run's attempt lives and its own processes say so."""
        until = time.monotonic() + wait
        said = b""
        while time.monotonic() < until:
            row = self.api("olga", f"/api/runs/{run}")
            said = base64.b64decode(self.api("olga", f"/api/runs/{run}/output", after=0)["data"])
            if row["attempt"] == attempt and row["state"] == "live" and b"hostile:" in said:
                return
            assert not (row["attempt"] == attempt and row["state"] in ("ended", "refused", "stopped")), row
            time.sleep(0.2)
        raise AssertionError(f"not alive: {said!r}")

    def attempt(self, run: str, attempt: int) -> dict[str, Any]:
        """Return the supervisor's own word about one attempt."""
        return next(r for r in self.supervisor()["runs"] if (r["run"], r["attempt"]) == (run, attempt))

    def pid(self, program: str) -> int:
        return int(json.loads((self.runtime / f"{program}.pid").read_text())["pid"])

    def kill(self, program: str) -> None:
        os.kill(self.pid(program), signal.SIGKILL)


def last_object(text: str) -> dict[str, Any]:
    for line in reversed(text.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {}


def make() -> Lab:
    lab = Lab(Path(tempfile.mkdtemp(prefix="ils-", dir="/tmp")))
    lab.folder.chmod(0o755)
    (lab.folder / "home").mkdir(mode=0o700)
    return lab
