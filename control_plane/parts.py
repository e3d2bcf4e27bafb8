"""What `app.py` built, as one typed value for routes and ticker. Holds no logic."""

import threading
from dataclasses import dataclass, field

from fastapi import Request
from sqlalchemy import Engine

from audit.ledger import Ledger
from control_plane.bell import Bell
from control_plane.desk import OrderDesk
from control_plane.keys import RunKeys
from control_plane.output import OutputStore
from control_plane.settings import Settings
from control_plane.signing import Signers
from control_plane.slot import BundleSlot
from policy.gate import Gate


@dataclass(frozen=True)
class Parts:
    """Everything that routes work with; the same objects for people and for nodes.

    `trust_seen` is node → version of its trust list, as its last heartbeat said.
    """

    settings: Settings
    engine: Engine
    kek: bytes
    signers: Signers
    ledger: Ledger
    bell: Bell
    desk: OrderDesk
    slot: BundleSlot
    gate: Gate
    output: OutputStore
    keys: RunKeys
    sequencing: threading.Lock = field(default_factory=threading.Lock)
    trust_seen: dict[str, int] = field(default_factory=dict)


def parts_of(request: Request) -> Parts:
    """Return the parts of the app that serves this request."""
    found = request.app.state.parts
    assert isinstance(found, Parts)
    return found
