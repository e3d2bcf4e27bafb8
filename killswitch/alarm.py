"""The command hook for NOT_CONFIRMED: people must hear it at once, by whatever pages them here.

The command comes from the command line or from `STATE/supervisor/settings.json`; it is run without a
shell, gets the facts as JSON on stdin, and has ten seconds; then it and what it started are killed. Its
failure changes nothing else. It does not inherit the supervisor's protection: a pager that eats the memory of
a host is killed like anything else.
"""

import json
import os
import shlex
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from interlock.errors import Malformed, Untrusted

LIMIT_S = 10.0
# The child gives up by itself what it inherited: nothing may run between fork and exec in a program with threads.
_ORDINARY = """
import os, sys
try:
    open("/proc/self/oom_score_adj", "w").write("0")
    os.setpriority(os.PRIO_PROCESS, 0, 0)
finally:
    os.execvp(sys.argv[1], sys.argv[1:])
"""


def command(words: str | None, settings: Path) -> list[str]:
    """Return the argv of the hook, [] when none is set.

    `words` from the command line wins. Raises Untrusted when others can write the settings file (it is run
    as root), Malformed when it is off.
    """
    if words is not None:
        return shlex.split(words)
    try:
        fd = os.open(settings, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return []
    with os.fdopen(fd, "rb") as source:
        info = os.fstat(source.fileno())
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in (0, os.geteuid()) or info.st_mode & 0o022:
            raise Untrusted(f"others can write {settings}", code="settings", next_step=f"chmod 600 {settings}")
        try:
            argv = json.loads(source.read(65536)).get("on_unconfirmed", [])
        except (ValueError, AttributeError):
            raise Malformed(f"{settings} is not a JSON object", code="settings") from None
    if not isinstance(argv, list) or not all(isinstance(a, str) for a in argv):
        raise Malformed("on_unconfirmed is a list of words", code="settings")
    return argv


def call_out(argv: list[str], facts: dict[str, Any]) -> None:
    """Say it on stderr and run the hook, in a thread of its own: a full pipe must not hold up a stop."""
    with suppress(RuntimeError):  # no thread to be had: the receipt still says it
        threading.Thread(target=_run, args=(argv, facts), daemon=True, name="alarm").start()


def _run(argv: list[str], facts: dict[str, Any]) -> None:
    print(json.dumps({"alarm": "not_confirmed", **facts}), file=sys.stderr, flush=True)  # noqa: T201
    if not argv:
        return
    error = _hook(argv, json.dumps(facts).encode())
    if error:
        print(json.dumps({"alarm": "hook_failed", "error": error}), file=sys.stderr, flush=True)  # noqa: T201


def _hook(argv: list[str], told: bytes) -> str:
    """Run the hook as an ordinary process in a session of its own; return what went wrong, "" for nothing."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _ORDINARY, *argv], stdin=subprocess.PIPE, cwd="/",
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )
    except OSError as error:
        return type(error).__name__
    try:
        process.communicate(told, LIMIT_S)
    except subprocess.TimeoutExpired as error:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return type(error).__name__
    return "" if process.returncode == 0 else f"exit {process.returncode}"
