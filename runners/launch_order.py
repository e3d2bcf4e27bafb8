"""Launch orders at the node: who signed it, whether it is for us, and that it works once.

A launch order is the only way in which a permission travels from the control plane to a node. What is
checked here is what the paper says; policy, stop state and evidence are the gate's business afterwards.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.durable import sync_folder
from interlock.errors import Conflict, Malformed, Untrusted
from interlock.order import LaunchOrder
from interlock.signed import GRANT, Signed, verify
from interlock.tier import PROFILES

_ID = re.compile(r"^[A-Za-z0-9_-]{8,64}$")


def read(signed: Signed, keys: Mapping[str, Ed25519PublicKey], node: str) -> LaunchOrder:
    """Return the launch order when a pinned grant key signed it for this node.

    Raises Untrusted (``untrusted.signature``, ``untrusted.node``) or Malformed: a lease longer than the
    tier's, labels that differ from the plan, more attempts than the restart budget.
    """
    order = LaunchOrder.from_json(verify(signed, GRANT, keys))
    if order.labels.node != node:
        raise Untrusted("the launch order is for another node", code="node")
    _check_tier(order)
    if not _ID.match(order.id):
        raise Malformed("the id of a launch order is not 8 to 64 letters and digits", code="launch_order")
    return order


def _check_tier(order: LaunchOrder) -> None:
    tier = PROFILES[order.plan.tier]
    if order.labels.tier is not order.plan.tier or order.labels.tenant != order.plan.tenant:
        raise Malformed("labels and plan of a launch order differ", code="launch_order")
    if order.lease_ms > tier.lease_ms or order.absent_ms > tier.absent_ms:
        raise Malformed("a launch order grants a longer lease than its tier", code="launch_order")
    if order.attempt - 1 > order.plan.restarts:
        raise Malformed("a launch order is beyond the restart budget of its plan", code="launch_order")


class UsedOrders:
    """The ids of launch orders that were ever begun here, one file each.

    `use` returns only when the name is durable, and before anything else is done with the order: whatever
    crashes afterwards, the order is spent. Each file says which attempt it was and in which boot.
    """

    def __init__(self, folder: Path, boot: str) -> None:
        self._folder, self._boot = folder, boot

    def forget(self, books: Path) -> int:
        """Drop ids of earlier boots whose attempt stands in the supervisor's `books`; return how many.

        The supervisor refuses those attempts by itself, for ever, so the id guards nothing any more. No clock
        is asked: one that was set wrong must not give a spent order back.
        """
        gone = 0
        for path in self._folder.iterdir():
            boot, _, name = path.read_text().partition(" ")
            if name and "/" not in name and boot != self._boot and (books / f"{name}.json").is_file():
                path.unlink()
                gone += 1
        return gone

    def use(self, order: LaunchOrder) -> None:
        """Spend its id; raises Conflict (``conflict.launch_order_used``) when it was spent before."""
        try:
            fd = os.open(self._folder / order.id, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise Conflict(
                "this launch order was used before", code="launch_order_used",
                next_step="restart the run: that makes a new launch order",
            ) from None
        with os.fdopen(fd, "w") as file:
            file.write(f"{self._boot} {order.run}.{order.attempt}")
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self._folder)
