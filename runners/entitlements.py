"""What this node may decide with: the active policy bundle and the entitlements, both signed, both with an age.

The age counts from the moment at which the question was SENT (CLOCK_BOOTTIME), so a delayed answer makes
nothing younger. It counts only when bundle and snapshot belong together: entitlements that name a newer bundle
than the one in force here confirm nothing.

Broker and gateway decide by the same: what they need is written to `STATE/shared`, and `SharedView` reads it.
"""

import secrets
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from interlock.call import Call, Decision
from interlock.canon import canonical
from interlock.durable import write_over
from interlock.errors import Refusal
from interlock.order import LaunchOrder
from interlock.permit import boottime_ms
from killswitch.store import boot_id
from policy import bundle as bundles
from policy import decide as deciding
from policy import snapshot as snapshots
from policy.facts import NEVER_MS, Facts
from policy.rbac import Engine
from runners.folders import Folders
from runners.pinned import read_signers
from runners.shared_view import CONFIRMED, SIGNERS, SNAPSHOT, facts_of
from runners.upstream import Upstream

Keys = Mapping[str, Ed25519PublicKey]


class Entitlements:
    """Bundle, snapshot and their age. Thread-safe: `_lock` guards all three together.

    Args: `grant_keys` and `signers` are asked at each use, since the pinned lists may change while we run.
    """

    def __init__(
        self, found: Folders, upstream: Upstream, grant_keys: Callable[[], Keys], signers: Callable[[], Keys]
    ) -> None:
        self._upstream, self._grant_keys, self._signers = upstream, grant_keys, signers
        self._shared: Path = found.shared
        self._kept: Path = found.shared / "bundle" / "active"
        self._pins: Path = found.node / "signers.json"
        self._lock = threading.Lock()
        self._engine: Engine | None = None
        self._snapshot: snapshots.Snapshot | None = None
        self._confirmed_ms = -NEVER_MS
        self._load()

    def _load(self) -> None:
        """Take up the last good bundle; it decides nothing until a snapshot confirms it."""
        self._kept.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        self._pass_on_pins()
        if not self._kept.exists():
            return
        try:
            kept = bundles.read(self._kept, self._signers(), None, stored=True)
        except Refusal:
            return  # its signer is not pinned any more, or it has expired: the next one must come whole
        self._engine = Engine(kept)

    def _pass_on_pins(self) -> None:
        """Copy the local pins to where broker and gateway may read them, when they differ."""
        data, copy = canonical(read_signers(self._pins)), self._shared / SIGNERS
        if not copy.exists() or copy.read_bytes() != data:
            write_over(copy, data, 0o644)

    @property
    def version(self) -> int:
        """Return the version of the bundle in force, 0 for none."""
        return 0 if self._engine is None else self._engine.bundle.version

    def refresh(self) -> None:
        """Ask for entitlements, and for the bundle that they name when it is newer than ours.

        Raises the refusal of whoever did not answer well; what was in force stays, and ages.
        """
        with self._lock:
            self._pass_on_pins()
            nonce, sent_ms = secrets.token_hex(16), boottime_ms()
            signed = self._upstream.snapshot(nonce)
            found = snapshots.verify(signed, self._grant_keys(), nonce)
            self._snapshot = found  # first: a person who was disabled must not wait for a bundle
            write_over(self._shared / SNAPSHOT, canonical(signed.as_json()), 0o644)
            if found.bundle_version > self.version:
                self._take_bundle()
            if found.bundle_version == self.version:
                self._confirmed_ms = sent_ms
                write_over(self._shared / CONFIRMED, canonical({
                    "boot_id": boot_id(), "nonce": nonce, "confirmed_ms": sent_ms, "bundle_version": self.version,
                }), 0o644)

    def _take_bundle(self) -> None:
        active = None if self._engine is None else self._engine.bundle
        _, archive = self._upstream.bundle()
        fresh = bundles.read(archive, self._signers(), active)
        write_over(self._kept, fresh.archive, 0o644)
        self._engine = Engine(fresh)

    def age_ms(self) -> int:
        """Return milliseconds since the last confirmed question was sent."""
        return min(NEVER_MS, boottime_ms() - self._confirmed_ms)

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Decide by the bundle in force; without one everything of a run is denied."""
        return deciding.decide(self._engine, call, facts)

    def facts(self, order: LaunchOrder) -> Facts:
        """Return what is known of the person behind a launch order.

        Roles and programmes come from the snapshot, never from the order; the second factor and the approvals
        were seen by the control plane and come in the order that it signed.
        """
        labels = order.labels
        return facts_of(self._snapshot, self.age_ms(), labels.owner, labels.tenant, order.facts)
