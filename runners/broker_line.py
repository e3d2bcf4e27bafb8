"""The launcher's end of the broker: starts the process under its own uid and tells it of runs.

A run's guest socket goes with the permit under which it was launched, sealed under a key that only these two
processes have (runners/unprivileged.py); its keys follow once the control plane has released them.
"""

import base64
import os
import socket
from collections.abc import Mapping
from pathlib import Path

from interlock.errors import Unavailable
from interlock.order import LaunchOrder
from interlock.permit import Permit
from runners.folders import Folders
from runners.unprivileged import UnprivilegedProgram, user_ids

PROGRAM = "broker"
BACKLOG = 32


def broker_ids(user: str) -> tuple[int, int]:
    """Return uid and gid of the broker; raises Unavailable (``unavailable.broker_user``)."""
    return user_ids(PROGRAM, user)


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
    """One broker process.

    Args: `found` the node's folders; `node` its id; `user` name or uid of the broker. Raises Unavailable when it does
    not come up and the broker's own refusal.
    """

    def __init__(self, found: Folders, node: str, user: str) -> None:
        self._program = UnprivilegedProgram(PROGRAM, found, node, user)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._program.pid

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._program.alive

    def open(self, order: LaunchOrder, permit: Permit, uid: int, listener: socket.socket) -> None:
        """Hand over the guest socket of an attempt, with the sealed permit. Raises the broker's refusal.

        With it goes what the plan lets the run save and load, and what the control plane told in the launch order.
        """
        plan = order.plan
        self._program.ask({
            "op": "open", "run": order.run, "attempt": order.attempt, "uid": uid,
            "labels": order.labels.as_json(), "resource": permit.resource, "permit": permit.seal(self._program.key),
            "plan": {"checkpoints": plan.checkpoints, "weights": list(plan.weights), "model": plan.model,
                     "serve": plan.serve, "digest": plan.digest()},
            "told": order.facts,
        }, listener.fileno())

    def keys(
        self, run: str, attempt: int, run_key: bytes | None, files: Mapping[str, Mapping[str, bytes]],
        newest: tuple[int, int] | None = None,
    ) -> None:
        """Hand over the keys of an open attempt. Raises NotFound (``not_found.guest``) when it is not open.

        Args: `run_key` for a plan with checkpoints; `files` version → file → key for the plan's weights; `newest`
        step and attempt of the newest checkpoint that the control plane knows.
        """
        self._program.ask({
            "op": "keys", "run": run, "attempt": attempt,
            "run_key": None if run_key is None else base64.b64encode(run_key).decode(),
            "files": {v: {n: base64.b64encode(k).decode() for n, k in f.items()} for v, f in files.items()},
            "newest": newest,
        })

    def close(self, run: str, attempt: int) -> None:
        """Tell the broker that an attempt is over; its socket closes. A broker that is gone is no error."""
        try:
            self._program.ask({"op": "close", "run": run, "attempt": attempt})
        except Unavailable:
            return

    def end(self) -> None:
        """End the process."""
        self._program.end()
