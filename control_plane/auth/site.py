"""What sign-in, enrolment and approvals work with, and the site's own state.

The control plane's composition root puts these on `app.state`; local commands build one themselves.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sqlalchemy import Connection, Engine

from control_plane.store import people

if TYPE_CHECKING:
    from audit.ledger import Ledger
    from policy.gate import Gate

TENANT = "lab"  # the tenant of the first administrator
APPROVER = "safety_officer"
ADMINISTRATOR = "administrator"
ROLES = frozenset({ADMINISTRATOR, "researcher", APPROVER, "on_call", "auditor", "partner"})
APPROVERS_NEEDED = 2


@dataclass(frozen=True)
class Site:
    """Database, key-encryption key (32 bytes), gate and ledger of one control plane."""

    engine: Engine
    kek: bytes
    gate: "Gate"
    ledger: "Ledger"


def state(connection: Connection) -> Literal["ready", "bootstrap"]:
    """Return ``bootstrap`` until two approvers with a person key have enrolled."""
    able = [p for p in people.with_role(connection, APPROVER) if p.person_key]
    return "ready" if len({p.person_key for p in able}) >= APPROVERS_NEEDED else "bootstrap"
