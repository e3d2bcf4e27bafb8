"""The ledger on our database: the one place that hands its tables over."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from sqlalchemy import Engine

from audit.ledger import Ledger
from control_plane.store.tables import ledger


def open_ledger(engine: Engine, signer: Ed25519PrivateKey, origin: str, keys: Path) -> Ledger:
    """Return the ledger whose tables lie in our database; the last signed head is remembered beside its key."""
    return Ledger(engine, ledger, signer, origin, last_head=keys / "head.last")
