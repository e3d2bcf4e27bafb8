"""The launcher's end of the broker: starts the process under its own uid and tells it of runs.

The permit key is made here at each start, lives in memory and goes to the broker through an inherited pipe; it
is in no file and in no argument list.
"""

import array
import base64
import json
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import sandbox
from interlock.errors import Malformed, Unavailable, from_json
from interlock.order import LaunchOrder
from interlock.permit import Permit
from runners.folders import Folders
from sandbox.reach import reach

ANSWER_S = 15.0
BACKLOG = 32


def broker_ids(user: str) -> tuple[int, int]:
    """Return uid and gid of the broker, named or given as a number.

    Raises Unavailable (``unavailable.broker_user``) for an unknown name and for root.
    """
    if user.isdigit() and int(user) > 0:
        return int(user), int(user)
    try:
        found = pwd.getpwnam(user)
    except KeyError:
        found = None
    if found is None or found.pw_uid == 0:
        raise Unavailable(
            f"there is no user {user} for the broker", code="broker_user",
            next_step=f"useradd --system --no-create-home --shell /usr/sbin/nologin {user}",
        )
    return found.pw_uid, found.pw_gid


def doorway(
    folder: Path, uid: int, name: str = "guest.sock", kind: socket.SocketKind = socket.SOCK_SEQPACKET
) -> socket.socket:
    """Return a listening socket of one run, connectable by that uid (and root) alone: its guest socket, unless `name`
    and `kind` say another."""
    path = folder / name
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, kind)
    try:
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, uid, uid, follow_symlinks=False)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


class BrokerLine:
    """One broker process. `_lock` keeps one question on the line at a time."""

    def __init__(self, found: Folders, node: str, user: str) -> None:
        self._key = secrets.token_bytes(32)
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(ANSWER_S)
        read_end, write_end = os.pipe()
        try:
            os.write(write_end, self._key)
        finally:
            os.close(write_end)
        try:
            self._process = _spawn(found, node, broker_ids(user), theirs.fileno(), read_end)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
            os.close(read_end)
        try:
            self.pid = int(self._answer()["pid"])
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._process.poll() is None

    def open(self, order: LaunchOrder, permit: Permit, uid: int, listener: socket.socket) -> None:
        """Hand over the guest socket of an attempt, with the sealed permit. Raises the broker's refusal.

        With it goes what the plan lets the run save and load, and what the control plane told in the launch order.
        """
        plan = order.plan
        self._ask({
            "op": "open", "run": order.run, "attempt": order.attempt, "uid": uid,
            "labels": order.labels.as_json(), "resource": permit.resource, "permit": permit.seal(self._key),
            "plan": {"checkpoints": plan.checkpoints, "weights": list(plan.weights), "model": plan.model,
                     "serve": plan.serve, "digest": plan.digest()},
            "told": order.facts,
        }, listener.fileno())

    def keys(
        self, run: str, attempt: int, run_key: bytes | None, files: Mapping[str, Mapping[str, bytes]]
    ) -> None:
        """Hand over the keys of an open attempt. Raises NotFound (``not_found.guest``) when it is not open.

        Args: `run_key` for a plan with checkpoints; `files` version → file → key for the plan's weights.
        """
        self._ask({
            "op": "keys", "run": run, "attempt": attempt,
            "run_key": None if run_key is None else base64.b64encode(run_key).decode(),
            "files": {v: {n: base64.b64encode(k).decode() for n, k in f.items()} for v, f in files.items()},
        })

    def close(self, run: str, attempt: int) -> None:
        """Tell the broker that an attempt is over; its socket closes. A broker that is gone is no error."""
        try:
            self._ask({"op": "close", "run": run, "attempt": attempt})
        except Unavailable:
            return

    def _ask(self, request: dict[str, Any], *fds: int) -> dict[str, Any]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._lock:
            try:
                self._control.sendmsg([json.dumps(request).encode()], rights)
            except OSError:
                raise _gone() from None
            return self._answer()

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(65536)
        except OSError:
            data = b""
        if not data:
            raise _gone()
        value = json.loads(data)
        if not isinstance(value, dict):
            raise Malformed("the broker's answer is not an object", code="wire")
        if value.get("ok") is not True:
            raise from_json(value.get("error") or {})
        return value

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


def _gone() -> Unavailable:
    return Unavailable("the broker does not answer", code="broker", next_step="see the node's standard error")


def _spawn(
    found: Folders, node: str, ids: tuple[int, int], control: int, key: int
) -> "subprocess.Popen[bytes]":
    """Start the broker through sandbox/drop.py, which makes only the needed folders reachable for its uid."""
    uid, gid = ids
    spool = found.broker_spool
    spool.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in (spool.parent, spool):
        os.chown(folder, uid, gid)
        folder.chmod(0o700)
    drop = Path(str(sandbox.__file__)).resolve().parent / "drop.py"
    argv = [sys.executable, "-I", "-S", str(drop), "--uid", str(uid), "--gid", str(gid)]
    for path in [*reach(), found.shared, found.runtime]:
        argv += ["--reach", str(path)]
    argv += ["--write", str(spool.parent), "--", sys.executable, "-I", "-m", "runners", "broker"]
    argv += ["--state", str(found.state), "--runtime", str(found.runtime), "--node", node]
    argv += ["--control", str(control), "--key", str(key)]
    return subprocess.Popen(argv, stdin=subprocess.DEVNULL, pass_fds=(control, key), close_fds=True, cwd="/")
