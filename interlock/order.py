"""Bodies of the signed orders: stop, resume, launch, lease. Formats: docs/formats/.

Never "order" alone: a stop order, a resume order, a launch order. Labels come from the signed launch
order only, never from what a node reports.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from interlock.call import number, text, texts
from interlock.errors import Malformed
from interlock.plan import Dataset as Dataset
from interlock.plan import Plan as Plan
from interlock.plan import check_new as check_new
from interlock.tier import Tier, tier_of


class ScopeKind(StrEnum):
    """What a stop can cover."""

    EVERYTHING = "everything"
    TENANT = "tenant"
    MODEL = "model"
    RUN = "run"
    SUBJECT = "subject"
    NODE = "node"


@dataclass(frozen=True)
class Labels:
    """What a run is, for the predicate `stopped`. `owner` is the person; `lineage` ancestor models."""

    tenant: str
    subject: str
    owner: str
    run: str
    node: str
    tier: Tier
    model: str = ""
    lineage: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "tenant": self.tenant, "subject": self.subject, "owner": self.owner, "run": self.run,
            "node": self.node, "tier": self.tier.value, "model": self.model, "lineage": list(self.lineage),
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse `as_json`; raises Malformed."""
        if not isinstance(value, dict):
            raise Malformed("labels are not an object")
        return cls(
            text(value, "tenant"), text(value, "subject"), text(value, "owner"), text(value, "run"),
            text(value, "node"), tier_of(value.get("tier")), text(value, "model", empty=True),
            texts(value, "lineage"),
        )


@dataclass(frozen=True)
class Scope:
    """What a stop order covers: a kind and, except for everything, an id."""

    kind: ScopeKind
    id: str = ""

    def matches(self, labels: Labels) -> bool:
        """Return whether a run with these labels is covered; a model covers its closed lineage."""
        match self.kind:
            case ScopeKind.EVERYTHING:
                return True
            case ScopeKind.TENANT:
                return labels.tenant == self.id
            case ScopeKind.MODEL:
                return labels.model == self.id or self.id in labels.lineage
            case ScopeKind.RUN:
                return labels.run == self.id
            case ScopeKind.SUBJECT:
                return self.id in (labels.subject, labels.owner)
            case ScopeKind.NODE:
                return labels.node == self.id

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"kind": self.kind.value, "id": self.id}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse `as_json`; raises Malformed."""
        if not isinstance(value, dict):
            raise Malformed("a scope is not an object")
        try:
            kind = ScopeKind(str(value.get("kind")))
        except ValueError:
            raise Malformed("unknown scope of a stop order", code="scope") from None
        found = text(value, "id", empty=True)
        if (kind is ScopeKind.EVERYTHING) != (found == ""):
            raise Malformed("every scope but everything names an id", code="scope")
        return cls(kind, found)

    @classmethod
    def parse(cls, words: str) -> Self:
        """Parse ``everything`` or ``kind:id`` as people type it; raises Malformed."""
        kind, _, found = words.partition(":")
        return cls.from_json({"kind": kind, "id": found})

    def __str__(self) -> str:
        return self.kind.value if not self.id else f"{self.kind.value}:{self.id}"


class Mode(StrEnum):
    """How a stop acts, from mild to final. The mode of a run is the highest of its active orders."""

    DRAIN = "drain"
    QUARANTINE = "quarantine"
    FREEZE = "freeze"
    KILL = "kill"


@dataclass(frozen=True)
class StopOrder:
    """One stop. `id` is 128 random bits (a latch file's is derived); `epoch` never refuses it (G1)."""

    id: str
    scope: Scope
    mode: Mode
    epoch: int
    actor: str
    reason: str

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object (body of interlock/stop/v1)."""
        return {
            "id": self.id, "scope": self.scope.as_json(), "mode": self.mode.value, "epoch": self.epoch,
            "actor": self.actor, "reason": self.reason,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; a mode that is not known here acts as kill, for a stop is never lost. Raises Malformed."""
        known = [m for m in Mode if m.value == value.get("mode")]
        mode = known[0] if known else Mode.KILL
        return cls(
            text(value, "id", limit=64), Scope.from_json(value.get("scope")), mode, number(value, "epoch"),
            text(value, "actor", limit=256), text(value, "reason", empty=True, limit=1000),
        )


@dataclass(frozen=True)
class ResumeApproval:
    """What one person signs with his own key (body of interlock/resume-approval/v1)."""

    request: str
    clears: tuple[str, ...]
    head: str
    person: str

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"request": self.request, "clears": list(self.clears), "head": self.head, "person": self.person}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        return cls(
            text(value, "request", limit=64), texts(value, "clears"), text(value, "head", limit=128),
            text(value, "person", limit=256),
        )


@dataclass(frozen=True)
class ResumeOrder:
    """Lifts exactly the stops in `clears` (body of interlock/resume/v1, signed by the grant key).

    `approvals` are the two Signed resume approvals as JSON; the supervisor verifies them itself.
    """

    id: str
    epoch: int
    clears: tuple[str, ...]
    head: str
    approvals: tuple[dict[str, Any], ...]

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "id": self.id, "epoch": self.epoch, "clears": list(self.clears), "head": self.head,
            "approvals": list(self.approvals),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        approvals = value.get("approvals")
        if not isinstance(approvals, list) or not all(isinstance(a, dict) for a in approvals):
            raise Malformed("approvals of a resume are not a list")
        clears = texts(value, "clears")
        if not clears or list(clears) != sorted(set(clears)):
            raise Malformed("a resume names its stops, sorted, each once")
        return cls(
            text(value, "id", limit=64), number(value, "epoch"), clears, text(value, "head", limit=128),
            tuple(approvals),
        )


@dataclass(frozen=True)
class LaunchOrder:
    """The signed permission to start one attempt on one node (body of interlock/grant/v1).

    `epoch` the stop epoch at the time of the grant; `lease_ms`, `absent_ms` at most those of the tier;
    `facts` what the control plane knew (roles, second factor age in ms, approving persons), for the
    node's own gate; `restart` number of earlier attempts.
    """

    id: str
    run: str
    attempt: int
    labels: Labels
    plan: Plan
    epoch: int
    lease_ms: int
    absent_ms: int
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "id": self.id, "run": self.run, "attempt": self.attempt, "labels": self.labels.as_json(),
            "plan": self.plan.as_json(), "epoch": self.epoch, "lease_ms": self.lease_ms,
            "absent_ms": self.absent_ms, "facts": self.facts,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        facts = value.get("facts")
        if not isinstance(facts, dict):
            raise Malformed("facts of a launch order are not an object")
        labels = Labels.from_json(value.get("labels"))
        run = text(value, "run", limit=64)
        if labels.run != run or not run.replace("_", "").isalnum():
            raise Malformed("labels and run of a launch order differ")
        return cls(
            text(value, "id", limit=64), run, number(value, "attempt", low=1, high=10_000), labels,
            Plan.from_json(value.get("plan")), number(value, "epoch"), number(value, "lease_ms", low=100),
            number(value, "absent_ms", low=100), facts,
        )


@dataclass(frozen=True)
class Lease:
    """The answer to one heartbeat nonce of one attempt (body of interlock/lease/v1, grant key)."""

    nonce: str
    run: str
    attempt: int
    node: str
    duration_ms: int
    epoch: int

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "nonce": self.nonce, "run": self.run, "attempt": self.attempt, "node": self.node,
            "duration_ms": self.duration_ms, "epoch": self.epoch,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        return cls(
            text(value, "nonce", limit=64), text(value, "run", limit=64), number(value, "attempt", low=1),
            text(value, "node", limit=64), number(value, "duration_ms", low=1), number(value, "epoch"),
        )


class Result(StrEnum):
    """What a receipt may say. Only CONFIRMED may be shown as stopped."""

    CONFIRMED = "confirmed"
    NOT_CONFIRMED = "not_confirmed"
    UNREACHABLE = "unreachable"
