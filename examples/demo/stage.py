"""What the demo stands on: the command, its answers, the phones of its people, the table at the end."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pyotp
from rich.console import Console
from rich.table import Table
from rich.text import Text

STEP_S = 30


class StepFailed(Exception):
    """A step did not show what it should have shown."""


class Walking(Exception):
    """Another demo walks in the same folder."""


@dataclass
class Phone:
    """An authenticator. A code works once, so it waits for the next one where it must."""

    uri: str
    last: int = 0

    def code(self) -> str:
        """Return a code that was not used yet: the previous step's, the current one's, or the next one's."""
        totp = pyotp.parse_uri(self.uri)
        if not isinstance(totp, pyotp.TOTP):
            raise StepFailed("the product gave something that is no TOTP secret")
        while True:
            now = time.time()
            step, left = int(now // STEP_S), STEP_S - now % STEP_S
            # The previous code is good until its successor's end; near that edge it might arrive too late.
            pick = step - 1 if step - 1 > self.last and left > 6 and self.last == 0 else step
            if pick > self.last:
                self.last = pick
                return str(totp.generate_otp(pick))
            time.sleep(min(left + 0.1, 1.0))


@dataclass
class Line:
    """One row of the table at the end."""

    title: str
    ok: bool
    what: str
    seconds: float


@dataclass
class Stage:
    """Starts commands in the demo's folder and keeps what each step showed."""

    root: Path
    folder: Path
    lines: list[Line] = field(default_factory=list)
    people_url: str = ""
    gateway_url: str = ""
    lock: int = -1
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 150)
        self.command = Path(sys.executable).parent / "interlock"
        self.state = self.folder / "state"
        self.runtime = self.state / "run"
        if len(os.fsencode(self.runtime)) > 44:  # sockets of runs lie deeper, and a socket's path is short
            name = hashlib.sha256(os.fsencode(self.folder)).hexdigest()[:8]
            self.runtime = Path("/run" if os.geteuid() == 0 else "/tmp") / f"interlock-demo-{name}"  # noqa: S108

    @property
    def where(self) -> list[str]:
        """Return the options that name the demo's site."""
        return ["--state", str(self.state), "--runtime", str(self.runtime)]

    # --- saying ------------------------------------------------------------------------------------
    def say(self, text: str, style: str = "") -> None:
        """Print a line."""
        self.console.print(Text(text, style=style))

    def proof(self, **facts: object) -> None:
        """Print evidence, each fact with its name."""
        for name, value in facts.items():
            line = Text(f"    {name.replace('_', ' ')}: ", style="dim")
            line.append(str(value), style="none")
            self.console.print(line)

    def step(self, title: str, act: Callable[[], str]) -> None:
        """Walk one step; what it returns goes into the table."""
        self.console.rule(Text(f"{len(self.lines) + 1}. {title}", style="bold"), align="left")
        start = time.monotonic()
        try:
            what = act()
        except (StepFailed, KeyError, OSError, ValueError, httpx.HTTPError, openai.OpenAIError,
                subprocess.SubprocessError) as error:
            self.lines.append(Line(title, False, f"{type(error).__name__}: {error}", time.monotonic() - start))
            raise StepFailed(f"step failed: {title}: {error}") from error
        self.lines.append(Line(title, True, what, time.monotonic() - start))
        self.say(f"  ok: {what}", "green")

    def table(self, titles: list[str]) -> None:
        """Print what held, what did not, and what was not reached."""
        made = Table(title="Interlock demo", title_justify="left")
        for column in ("step", "result", "what was shown", "s"):
            made.add_column(column, overflow="fold", justify="right" if column == "s" else "left")
        for line in self.lines:
            word = Text("ok", style="bold green") if line.ok else Text("FAILED", style="bold red")
            made.add_row(Text(line.title), word, Text(line.what), f"{line.seconds:.1f}")
        for title in titles[len(self.lines):]:
            made.add_row(Text(title), Text("not reached", style="yellow"), Text(""), "")
        self.console.print(made)
        good = sum(line.ok for line in self.lines)
        self.say(f"{good} of {len(titles)} steps ok in {time.monotonic() - self.began:.0f} s",
                 "bold green" if good == len(titles) else "bold red")

    # --- commands ----------------------------------------------------------------------------------
    def environment(self, code: str = "") -> dict[str, str]:
        """Return the environment of the demo's people."""
        kept = {k: v for k, v in os.environ.items() if k in ("PATH", "LANG", "TERM")}
        found = {**kept, "HOME": str(self.folder), "INTERLOCK_HOME": str(self.folder / "home"),
                 "INTERLOCK_URL": self.people_url}
        return {**found, "INTERLOCK_CODE": code} if code else found

    def ask(self, *words: str, who: str = "", code: str = "", wait_s: float = 90.0) -> tuple[int, dict[str, Any]]:
        """Run `interlock … --json` as `who`; return its exit status and its object."""
        argv = [str(self.command), "--json", *(["--profile", who] if who else []), *words]
        done = subprocess.run(argv, env=self.environment(code), stdin=subprocess.DEVNULL, capture_output=True,
                              text=True, timeout=wait_s, check=False)
        return done.returncode, last_object(done.stdout, done.stderr)

    def must(self, *words: str, who: str = "", code: str = "", wait_s: float = 90.0) -> dict[str, Any]:
        """Run a command that has to succeed."""
        status, value = self.ask(*words, who=who, code=code, wait_s=wait_s)
        if status != 0:
            raise StepFailed(f"interlock {' '.join(words[:2])} ended with {status}: {brief(value)}")
        return value

    def refused(self, code: str, *words: str, who: str = "", otp: str = "") -> dict[str, Any]:
        """Run a command that has to be refused with `code`; print code and reason; return the error."""
        status, value = self.ask(*words, who=who, code=otp)
        error = value.get("error")
        if status == 0 or not isinstance(error, dict):
            raise StepFailed(f"interlock {' '.join(words[:2])} was not refused: {brief(value)}")
        if error["code"].split(".")[0] != code.split(".")[0] or not error["code"].startswith(code):
            raise StepFailed(f"refused with {error['code']}, expected {code}: {error.get('message')}")
        step = f" → {error['next_step']}" if error.get("next_step") else ""
        self.proof(**{f"{who} is refused": f"[{error['code']}] {error['message']}{step}"})
        return error

    def program(self, module: str, *words: str) -> dict[str, Any]:
        """Run one of the local programs (`python -I -m …`) and return its object."""
        done = subprocess.run([sys.executable, "-I", "-m", module, *words, *self.where], capture_output=True,
                              text=True, timeout=30, check=False, cwd="/", env=self.environment())
        if done.returncode != 0:
            raise StepFailed(f"{module} {words[0]} ended with {done.returncode}: {done.stderr[-300:]}")
        return last_object(done.stdout, done.stderr)

    def program_refused(self, module: str, *words: str) -> dict[str, Any]:
        """Run a local program that has to refuse; return its object."""
        done = subprocess.run([sys.executable, "-I", "-m", module, *words, *self.where], capture_output=True,
                              text=True, timeout=30, check=False, cwd="/", env=self.environment())
        value = last_object(done.stdout, done.stdout) if done.stdout.strip() else last_object(done.stderr, done.stderr)
        if done.returncode == 0 or "error" not in value:
            raise StepFailed(f"{module} {words[0]} was not refused: {brief(value)}")
        return value

    def api(self, who: str, path: str, **params: object) -> dict[str, Any]:
        """GET a route of the people API with the session that `who` keeps in his profile."""
        kept = json.loads((self.folder / "home" / "profiles" / who / "credentials.json").read_text())
        answer = httpx.get(self.people_url + path, params={k: str(v) for k, v in params.items()}, trust_env=False,
                           headers={"authorization": f"Bearer {kept['session']}"}, timeout=40)
        answer.raise_for_status()
        value = answer.json()
        return value if isinstance(value, dict) else {"items": value}

    # --- beginning and end -------------------------------------------------------------------------
    def replace_previous(self) -> None:
        """Stop what an earlier demo left running, and forget it; one that still walks is left alone."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Walking(f"another demo walks in {self.folder}; wait for it, or name another folder: "
                          f"make demo DEMO_STATE=/some/folder") from None
        if self.state.exists():
            self.say("an earlier demo is stopped and replaced")
            self.must("down", *self.where)
        for item in self.folder.iterdir():
            if item.is_dir() and not item.is_symlink():
                shutil.rmtree(item)
            else:
                item.unlink()
        (self.folder / "home").mkdir()
        self.folder.chmod(0o755)
        (self.folder / "home").chmod(0o700)

    def take_down(self) -> None:
        """Stop everything."""
        status, value = self.ask("down", *self.where)
        self.say("everything is stopped" if status == 0 else f"down ended with {status}: {brief(value)}")

    def farewell(self) -> None:
        """Say what still runs and how to look at it."""
        if not self.people_url:
            return
        self.say(f"still running: {self.people_url}", "bold")
        self.say("  people: ada, remy, olga, otto, opal, oren, casey, pia")
        self.say(f"  passwords {self.folder}/people, phones {self.folder}/phones")
        self.say(f"  end it: {self.command} down {' '.join(self.where)}")


def last_object(out: str, err: str) -> dict[str, Any]:
    """Return the last JSON object that a command printed."""
    for line in reversed(out.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return {"stdout": out[-400:], "stderr": err[-400:]}


def brief(value: dict[str, Any]) -> str:
    """Return an answer on one line: the refusal when it is one."""
    error = value.get("error")
    if isinstance(error, dict):
        step = f" → {error['next_step']}" if error.get("next_step") else ""
        details = f" {json.dumps(error['details'])[:600]}" if error.get("details") else ""
        return f"[{error.get('code')}] {error.get('message')}{step}{details}"
    return json.dumps(value)[:600]


def free_ports() -> list[int]:
    """Return 7070, 7071 and 7072 when nobody has them, else three free ports."""
    wanted = [7070, 7071, 7072]
    if all(_free(port) for port in wanted):
        return wanted
    held = [socket.socket() for _ in wanted]
    try:
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]
    finally:
        for one in held:
            one.close()


def _free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            with socket.socket(family) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                one.bind((address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
    return True
