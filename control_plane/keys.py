"""Run keys at the control plane: which provider wraps for a tier, minting at launch, and which leases live.

Rules:
1. A plan that saves checkpoints is refused before anything is spent when no provider fits its tier.
2. The provider is asked before the transaction that places the run, never in it: a token that hangs must not hold
   the one write lock, on which every lease waits. The wrapped key is kept in that transaction, so that a run is
   placed with its key or not at all.
3. Whether a lease lives is counted on CLOCK_BOOTTIME from what this process granted. After a start nothing counts as
   leased until the next heartbeat.
"""

import threading
from collections.abc import Iterable
from pathlib import Path

from sqlalchemy import Connection

from audit.ledger import Ledger
from control_plane.store import run_keys
from control_plane.store.db import now_us
from interlock.errors import Denied
from interlock.event import Event, EventType
from interlock.order import Labels, Plan
from interlock.permit import Permit, boottime_ms
from interlock.tier import PROFILES, Tier
from interlock.touched import action_of, resource_of
from kms import local, pkcs11
from kms.assignment import Assignment
from kms.envelope import RunKey, mint
from kms.provider import LOCAL, PKCS11, Context
from kms.ring import KeyRing

FOLDER = "run-kek"
_FORGET_MS = 10 * max(p.lease_ms for p in PROFILES.values())


class RunKeys:
    """The providers and the live leases of one control plane. Safe for threads.

    Args: `assignment` from the settings; `folder` of the key files and of each provider's state file.
    """

    def __init__(self, assignment: Assignment, folder: Path) -> None:
        self._assignment = assignment
        self._local = local.open_folder(folder, assignment.local_tiers())
        place = assignment.pkcs11
        self._token = None if place is None else pkcs11.open_token(place, folder / "pkcs11.json")
        self._leased: dict[tuple[str, int], int] = {}
        self._lock = threading.Lock()

    def prepare(self, wrapped_by: Iterable[str] = ()) -> None:
        """Make the key file of the local provider when there is none yet. Asks no token.

        Args: `wrapped_by` providers that have wrapped keys which are kept. One that has lost its KEK since gets no new
        one: what is restored later would take its place, and the keys made meanwhile would be lost. Raises Conflict
        (``conflict.kek_state``) then.
        """
        for name, ring in ((LOCAL, self._local), (PKCS11, self._token)):
            if ring is not None and name in wrapped_by:
                ring.expect()
        self._local.prepare()

    # --- providers --------------------------------------------------------------------------------
    def provider_for(self, tier: Tier) -> KeyRing:
        """Return the provider that wraps for `tier`; raises Denied (``denied.provider``)."""
        return self.named(self._assignment.provider(tier))

    def named(self, provider: str) -> KeyRing:
        """Return the provider of that name, as a kept key says it; raises Denied (``denied.provider``)."""
        found = {LOCAL: self._local, PKCS11: self._token}.get(provider)
        if found is None:
            raise Denied(f"the key provider {provider} is not set up", code="provider",
                         next_step="set kms.pkcs11 in settings.json (docs/formats/key-hierarchy.md)")
        return found

    def require(self, plan: Plan) -> None:
        """Raise Denied (``denied.provider``) when the plan saves checkpoints and no provider fits its tier."""
        if plan.checkpoints:
            self.provider_for(plan.tier)

    # --- minting ----------------------------------------------------------------------------------
    def mint(self, permit: Permit, plan: Plan, labels: Labels, attempt: int, epoch: int) -> RunKey | None:
        """Return a wrapped run key for a first attempt that saves checkpoints, else None: a later attempt goes on
        with the key that is there.

        Args: `permit` to launch exactly this; `epoch` the present stop epoch. Raises what `kms.envelope.mint` does.
        """
        if not plan.checkpoints or attempt != 1:
            return None
        context = Context(labels.tenant, labels.model, labels.run, labels.tier)
        return mint(permit, self.provider_for(plan.tier), context, action=action_of(plan, attempt),
                    resource=resource_of(plan).path, epoch=epoch)

    def keep(self, connection: Connection, ledger: Ledger, kept: RunKey, subject: str) -> None:
        """Keep a minted key and its record, in the transaction that places its run, after the run's row."""
        run_keys.add(connection, kept, now_us())
        ledger.record(Event(EventType.RUN_KEY_MADE, subject, kept.context.tenant, kept.context.run, facts={
            "provider": kept.wrapped.provider, "kek": kept.wrapped.kek, "kek_version": kept.wrapped.version,
            "tier": kept.context.tier.value}), connection)

    # --- leases -----------------------------------------------------------------------------------
    def leased(self, run: str, attempt: int) -> None:
        """Note that a lease was granted just now."""
        now = boottime_ms()
        with self._lock:
            self._leased[(run, attempt)] = now
            if len(self._leased) > 4096:
                self._leased = {k: at for k, at in self._leased.items() if now - at < _FORGET_MS}

    def lease_live(self, run: str, attempt: int, lease_ms: int) -> bool:
        """Return whether this process granted the attempt a lease less than `lease_ms` ago."""
        with self._lock:
            granted = self._leased.get((run, attempt))
        return granted is not None and 0 <= boottime_ms() - granted < lease_ms
