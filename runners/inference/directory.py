"""Which models there are for a caller, and what policy says of him and one of them. Nothing here is recorded.

The decision that counts is the gate's, which is recorded; here the same policy is asked beforehand, to tell nobody of
models that are not for him: one that he may not see and one that does not exist are the same answer.
"""

from typing import Protocol

from interlock.call import Action, Call, Decision, Resource
from interlock.errors import NotFound, Stale
from interlock.tier import Tier
from policy.facts import ANONYMOUS, Facts
from policy.snapshot import ModelRow, Snapshot
from runners.inference.callers import Caller


class View(Protocol):
    """What runners/shared_view.py offers."""

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Decide by the bundle in force."""

    def facts_of(self, person: str, tenant: str, **told: object) -> Facts:
        """Return what is known of a person."""

    def snapshot(self) -> Snapshot | None:
        """Return the entitlements."""

    def age_ms(self) -> int:
        """Return their age."""


class Directory:
    """Args: `view` bundle and entitlements as the launcher shares them."""

    def __init__(self, view: View) -> None:
        self._view = view

    def entitlements(self) -> Snapshot | None:
        """Return the present entitlements, or None."""
        return self._view.snapshot()

    def facts(self, caller: Caller) -> Facts:
        """Return what is known of a caller: of an anonymous one nothing but that."""
        if caller.anonymous:
            return Facts(roles=frozenset({ANONYMOUS}), bundle_age_ms=self._view.age_ms())
        return self._view.facts_of(caller.person, caller.tenant)

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Decide by the bundle in force."""
        return self._view.decide(call, facts)

    def find(self, name: str, caller: Caller) -> tuple[ModelRow, bool]:
        """Return the model of that name, and whether policy would allow him to call it.

        One of his own tenant he may know of, allowed or not. Raises NotFound (``not_found.model``: there is none, or
        it is not for him) or Stale.
        """
        found = self._known().model(name)
        allowed = found is not None and self.allowed(found, caller)
        if found is None or not (allowed or found.tenant == caller.tenant):
            raise NotFound("there is no such model, or it is not yours to call", code="model",
                           next_step="see GET /v1/models")
        return found, allowed

    def listed(self, caller: Caller) -> list[ModelRow]:
        """Return the models that a caller may call, on whatever terms. Raises Stale."""
        return [row for row in self._known().models if self.allowed(row, caller)]

    def allowed(self, row: ModelRow, caller: Caller) -> bool:
        """Return whether policy would allow him to call it, on whatever terms."""
        facts = self.facts(caller)
        actions = [Action.INFER, *([Action.INFER_RESTRICTED] if row.tier is Tier.CRITICAL else [])]
        return any(self.decide(call_of(action, caller, row), facts).allowed for action in actions)

    def _known(self) -> Snapshot:
        found = self._view.snapshot()
        if found is None:
            raise Stale("no entitlements are known here", code="entitlements",
                        next_step="restore the connection to the control plane")
        return found


def call_of(action: Action, caller: Caller, row: ModelRow, run: str = "", call: str = "asked") -> Call:
    """Return the Call that policy decides: who, which version of which model, on which engine."""
    resource = Resource("model", row.name, row.tenant, row.tier, row.lineage)
    return Call(action, caller.subject, resource, run, row.version, caller.source, call)
