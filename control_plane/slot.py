"""The bundle slot: the one policy bundle in force, empty until somebody publishes a signed one.

A bundle is verified against the signers pinned in ``trust/signers.json``, checked, turned into an engine, stored
and only then swapped in by one reference; whatever is refused leaves the old one deciding. The stored copy is
verified again at start.
"""

import threading
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import Engine as Database

from control_plane.signing import bundle_pins
from control_plane.store import bundles
from control_plane.store.db import now_us, reading, writing
from interlock.call import Call, Decision
from policy import decide as deciding
from policy.bundle import Bundle, read
from policy.facts import Facts
from policy.rbac import Engine


@dataclass(frozen=True)
class Active:
    """A bundle and the engine built from it."""

    bundle: Bundle
    engine: Engine


class BundleSlot:
    """Holds the active bundle; `_lock` serialises publishing, readers take the reference once."""

    def __init__(self, database: Database, trust: Path) -> None:
        self._database, self._trust = database, trust
        self._lock = threading.Lock()
        self._active: Active | None = None

    def load(self) -> None:
        """Load the stored active bundle, verifying it again. Raises Untrusted or Malformed: then the slot
        stays empty and everything but sign-in and enrolment is denied."""
        with reading(self._database) as connection:
            row = bundles.active(connection)
        if row is not None:
            bundle = read(bytes(row.archive), bundle_pins(self._trust), None, stored=True)
            self._active = Active(bundle, Engine(bundle))

    @property
    def active(self) -> Bundle | None:
        """Return the bundle in force."""
        found = self._active
        return found.bundle if found else None

    @property
    def engine(self) -> Engine | None:
        """Return the engine of the bundle in force (to explain a decision)."""
        found = self._active
        return found.engine if found else None

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Return the decision by the bundle in force (for the gate)."""
        found = self._active
        return deciding.decide(found.engine if found else None, call, facts)

    def publish(self, archive: bytes, by: str) -> Bundle:
        """Verify, store and activate a bundle. Raises Untrusted, Malformed, Conflict or Unavailable."""
        with self._lock:
            bundle = read(archive, bundle_pins(self._trust), self.active)
            fresh = Active(bundle, Engine(bundle))
            with writing(self._database) as connection:
                bundles.publish(connection, bundle.version, bundle.digest, archive, by, now_us())
            self._active = fresh
        return bundle
