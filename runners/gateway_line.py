"""The launcher's end of the gateway: starts the process under its own uid and tells it of engines.

Decision 0004 §6. The gateway holds the listening end of each engine's socket; the permit under which an engine
was launched goes with it, sealed under a key that only these two processes have.
"""

import socket
from typing import Any

from interlock.errors import Malformed, Unavailable
from interlock.order import LaunchOrder
from interlock.permit import Permit
from runners.folders import Folders
from runners.unprivileged import UnprivilegedProgram, user_ids

PROGRAM = "gateway"
USER = "interlock-gateway"


def gateway_ids(user: str = USER) -> tuple[int, int]:
    """Return uid and gid of the gateway; raises Unavailable (``unavailable.gateway_user``)."""
    return user_ids(PROGRAM, user)


class GatewayLine:
    """One gateway process.

    Args: `found` the node's folders; `node` its id; `user` name or uid of the gateway; `port` where it serves on
    127.0.0.1, 0 for any free one. Raises Unavailable when it does not come up and the gateway's own refusal.
    """

    def __init__(self, found: Folders, node: str, user: str, port: int) -> None:
        self._program = UnprivilegedProgram(PROGRAM, found, node, user, ("--port", str(port)))
        self.port = int(self._program.ready.get("port", port))

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._program.pid

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self._program.alive

    def open(self, order: LaunchOrder, permit: Permit, uid: int, listener: socket.socket) -> None:
        """Hand over the listening engine socket of an attempt. The caller may close his own end afterwards.

        Args: `order` of a plan with `serve` and one version; `uid` the run's own, the only one that is listened
        to. Raises Malformed (not a plan to serve) or the gateway's refusal.
        """
        if not order.plan.serve or len(order.plan.weights) != 1:
            raise Malformed("an engine serves exactly one version", code="serve")
        self._program.ask({
            "op": "open", "run": order.run, "attempt": order.attempt, "uid": uid,
            "labels": order.labels.as_json(), "version": order.plan.weights[0], "resource": permit.resource,
            "permit": permit.seal(self._program.key),
        }, listener.fileno())

    def close(self, run: str, attempt: int) -> None:
        """Tell the gateway that an attempt is over; its connections close. A gateway that is gone is no error."""
        try:
            self._program.ask({"op": "close", "run": run, "attempt": attempt})
        except Unavailable:
            return

    def engines(self) -> list[dict[str, Any]]:
        """Return what is open, as ``{run, attempt, ready, error}``; `error` is empty or a code of ours.

        Raises Unavailable (``unavailable.gateway``) when the gateway does not answer.
        """
        found = self._program.ask({"op": "engines"}).get("engines")
        if not isinstance(found, list):
            raise Malformed("the gateway's engines are no list", code="wire")
        return found

    def end(self) -> None:
        """End the process."""
        self._program.end()
