"""The broker's own gate: each save and load of a run is decided here, with the launcher's bundle and entitlements.

The control plane has approved the plan, and the launcher has asked its gate for the launch; a run lives on for days
after that. What its owner may do is asked anew each time.
"""

from collections.abc import Callable
from typing import Protocol

from interlock.call import Action, Call, Decision, Resource, Subject
from interlock.event import Event, Written
from interlock.order import Labels, StopOrder
from interlock.permit import Permit, boottime_ms
from interlock.tier import highest
from policy.facts import Facts
from policy.gate import Gate
from policy.snapshot import Snapshot
from runners.guest import Guest


class View(Protocol):
    """What the decision is made with: runners.shared_view.SharedView."""

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Decide by the bundle in force."""

    def facts_of(self, person: str, tenant: str, **told: object) -> Facts:
        """Return what is known of a person."""

    def snapshot(self) -> Snapshot | None:
        """Return the verified entitlements."""


class BrokerGate:
    """Asks for one guest at a time. Args: `view`, `stopped`, `record` and `epoch` as policy.gate.Gate has them."""

    def __init__(
        self, view: View, stopped: Callable[[Labels], StopOrder | None], record: Callable[[Event], Written],
        epoch: Callable[[], int],
    ) -> None:
        self._view, self._stopped, self._record, self._epoch = view, stopped, record, epoch

    def own(self, guest: Guest, action: Action) -> Permit:
        """Return the permit to save into, or load from, the run's own checkpoints. Raises what the gate raises."""
        labels = guest.labels
        resource = Resource("run", guest.run, labels.tenant, labels.tier, labels.lineage)
        return self._ask(guest, action, resource, own=True)

    def version(self, guest: Guest, digest: str) -> Permit:
        """Return the permit to load a registered version. Raises what the gate raises.

        The model's name, tier and ancestors come from the entitlements while they list that version. An older one is
        named by its plan (an engine's model) or by its digest, and counts as of the run's tier.
        """
        labels, snapshot = guest.labels, self._view.snapshot()
        models = () if snapshot is None else snapshot.models
        row = next((m for m in models if m.version == digest), None)
        if row is None:
            name = guest.granted.model if guest.granted.serve and guest.granted.model else digest
            resource = Resource("model", name, labels.tenant, labels.tier, labels.lineage)
        else:
            tier = highest(labels.tier, row.tier)
            resource = Resource("model", row.name, row.tenant, tier, row.lineage)
        return self._ask(guest, Action.LOAD, resource, own=False)

    def use(self, permit: Permit, action: Action) -> None:
        """Check a permit right before the effect: alive, and no stop came in between."""
        permit.check(action, permit.resource, epoch=self._epoch())

    def _ask(self, guest: Guest, action: Action, resource: Resource, *, own: bool) -> Permit:
        labels, told = guest.labels, {**guest.granted.told, "own": own}
        age = told.get("mfa_age_ms")
        if isinstance(age, int) and not isinstance(age, bool):  # it was told when the run was opened, and grows
            told["mfa_age_ms"] = age + boottime_ms() - guest.granted.opened_ms
        gate = Gate(self._view.decide, lambda _: self._stopped(labels), self._record, self._epoch)
        subject = Subject(labels.subject, labels.tenant, person=labels.owner)
        call = Call(action, subject, resource, run=guest.run, bound=guest.granted.bound)
        return gate.ask(call, self._view.facts_of(labels.owner, labels.tenant, **told))
