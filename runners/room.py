"""What saving and loading share: store, keys, gate, leash and record."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.errors import Denied
from interlock.event import EventType
from runners.broker_gate import BrokerGate
from runners.guest import Guest
from runners.store import Store
from runners.vault import Vault


@dataclass(frozen=True)
class Room:
    """`leash` raises Halted when the attempt is over, stopped or without a lease; `record` is durable when it
    returns, and raises NotRecorded."""

    store: Store
    vault: Vault
    gate: BrokerGate
    leash: Callable[[Guest], None]
    record: Callable[[EventType, Guest, Mapping[str, Any]], object]


def require_checkpoints(guest: Guest) -> None:
    """Refuse a run whose plan keeps no checkpoints; raises Denied (``denied.plan``)."""
    if not guest.granted.checkpoints:
        raise Denied("the plan of this run keeps no checkpoints", code="plan",
                     next_step="launch it with checkpoints=true, or with interlock train")
