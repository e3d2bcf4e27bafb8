"""The launcher's end of a program of ours that runs under a user of its own: the gateway, say.

Such a program gets three things at its start and nothing by an argument list: a control socket, a permit key
through an inherited pipe, and (by sandbox/drop.py) only the folders that it needs. The key is made here at each
start and lives in memory. When the launcher goes, the control socket ends, and so does the program.
"""

import array
import json
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sandbox
from interlock.errors import Malformed, Unavailable, from_json
from runners.folders import Folders
from sandbox.reach import reach

ANSWER_S = 15.0
ANSWER_LIMIT = 65_536
KEY_BYTES = 32


def user_ids(program: str, user: str) -> tuple[int, int]:
    """Return uid and gid of the user of `program`, named or given as a number.

    Raises Unavailable (``unavailable.PROGRAM_user``) for an unknown name and for root.
    """
    if user.isdigit() and int(user) > 0:
        return int(user), int(user)
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        found = None
    if found is None or found.pw_uid == 0:
        raise Unavailable(
            f"there is no user {user} for the {program}", code=f"{program}_user",
            next_step=f"useradd --system --no-create-home --shell /usr/sbin/nologin {user}",
        )
    return found.pw_uid, found.pw_gid


class UnprivilegedProgram:
    """One such program. `_lock` keeps one question on the line at a time; one that stays without an answer for
    `ANSWER_S` is the last.

    Args: `program` its word on our command line and its folder below the state; `words` further words of it.
    Raises Unavailable when it does not come up, and its own refusal.
    """

    def __init__(self, program: str, found: Folders, node: str, user: str, words: Sequence[str] = ()) -> None:
        self._program, self.key = program, secrets.token_bytes(KEY_BYTES)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_S)
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, self.key)
        finally:
            os.close(write_end)
        try:
            ids = user_ids(program, user)
            self._process = _spawn(program, found, node, ids, (theirs.fileno(), read_end), words)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(read_end)
        try:
            self.ready = self._answer()
            self.pid = int(self.ready["pid"])
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def ask(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        """Send one control message and return the answer; raises the program's refusal or Unavailable."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                self._control.sendmsg([json.dumps(request).encode()], rights)
            except OSError:
                raise self._gone() from None
            return self._answer()

    def _give_up(self) -> None:
        """Kill a program that does not answer: it hangs, and a late answer would be taken for that of the next
        question. Whoever keeps it sees that it died and starts it again."""
        self._process.kill()
        self._process.wait(5.0)

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(ANSWER_LIMIT)
        except TimeoutError:
            self._give_up()
            data = b""
        except OSError:
            data = b""
        if not data:
            raise self._gone()
        value = json.loads(data)
        if not isinstance(value, dict):
            raise Malformed(f"the answer of the {self._program} is not an object", code="wire")
        if value.get("ok") is not True:
            raise from_json(value.get("error") or {})
        return value

    def _gone(self) -> Unavailable:
        return Unavailable(
            f"the {self._program} does not answer", code=self._program, next_step="see the node's standard error"
        )

    def end(self) -> None:
        """End the process: the closed control socket, then SIGTERM, then SIGKILL."""
        self._control.close()
        for force in (None, signal.SIGTERM, signal.SIGKILL):
            if force is not None:
                self._process.send_signal(force)
            try:
                self._process.wait(5.0)
                return
            except subprocess.TimeoutExpired:
                continue


def _spawn(
    program: str, found: Folders, node: str, ids: tuple[int, int], fds: tuple[int, int], words: Sequence[str]
) -> "subprocess.Popen[bytes]":
    """Start it through sandbox/drop.py, which makes only the needed folders reachable for its uid."""
    (uid, gid), (control, key) = ids, fds
    own = found.state / program
    for folder in (own, own / "spool"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chown(folder, uid, gid)
        folder.chmod(0o700)
    drop = Path(str(sandbox.__file__)).resolve().parent / "drop.py"
    argv = [sys.executable, "-I", "-S", str(drop), "--uid", str(uid), "--gid", str(gid)]
    for path in [*reach(), found.shared, found.runtime]:
        argv += ["--reach", str(path)]
    argv += ["--write", str(own), "--", sys.executable, "-I", "-m", "runners", program]
    argv += ["--state", str(found.state), "--runtime", str(found.runtime), "--node", node]
    argv += ["--control", str(control), "--key", str(key), *words]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=fds, close_fds=True, cwd="/")
