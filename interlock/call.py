"""Frozen values that cross a boundary: who, what, on which thing, and the answer.

Every value has `as_json()` (canonical subset) and `from_json()`; `digest` is over the canonical bytes.
Facts in a Call come from our store or the transport, never from the caller's body.
"""

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from interlock.canon import digest
from interlock.errors import Malformed
from interlock.tier import Tier, tier_of


class Kind(StrEnum):
    """The three kinds of action: a stop blocks work, never govern; stop itself is neither."""

    WORK = "work"
    GOVERN = "govern"
    STOP = "stop"


class Action(StrEnum):
    """Every action that passes the gate, on one page. The value is what policy files name."""

    INFER = "infer"
    INFER_RESTRICTED = "infer_restricted"
    LAUNCH = "launch"
    SERVE = "serve"
    CONTINUE = "continue"
    RESTART = "restart"
    READ_DATA = "read_data"
    SAVE = "save"
    LOAD = "load"
    RELEASE_KEY = "release_key"
    CALL_TOOL = "call_tool"
    EXPORT_WEIGHTS = "export_weights"
    SIGN_IN = "sign_in"
    ENROL = "enrol"
    LOOK = "look"
    INVITE = "invite"
    MINT_KEY = "mint_key"
    REGISTER = "register"
    ENROL_PARTNER = "enrol_partner"
    APPROVE = "approve"
    RESUME = "resume"
    PUBLISH_BUNDLE = "publish_bundle"
    EXPORT_EVIDENCE = "export_evidence"
    JOIN_NODE = "join_node"
    CHANGE_TRUST = "change_trust"
    CHANGE_TIER = "change_tier"
    DESTROY_KEY = "destroy_key"
    STOP = "stop"

    @property
    def kind(self) -> Kind:
        """Return whether this is work, govern or stop."""
        if self is Action.STOP:
            return Kind.STOP
        return Kind.WORK if self in _WORK else Kind.GOVERN


_WORK = frozenset(
    {Action.INFER, Action.INFER_RESTRICTED, Action.LAUNCH, Action.SERVE, Action.CONTINUE, Action.RESTART,
     Action.READ_DATA, Action.SAVE, Action.LOAD, Action.RELEASE_KEY, Action.CALL_TOOL, Action.EXPORT_WEIGHTS}
)


def new_id(prefix: str) -> str:
    """Return ``prefix_`` + 128 random bits in hex; ids carry their type."""
    return f"{prefix}_{secrets.token_hex(16)}"


def text(value: dict[str, Any], key: str, *, empty: bool = False, limit: int = 4096) -> str:
    """Return the string under `key`; raises Malformed when absent, empty (unless `empty`) or too long."""
    found = value.get(key)
    if not isinstance(found, str) or len(found) > limit or (not found and not empty):
        raise Malformed(f"field {key!r} is not a text of 1 to {limit} characters")
    return found


def number(value: dict[str, Any], key: str, *, low: int = 0, high: int = 2**53 - 1) -> int:
    """Return the integer under `key` within [low, high]; raises Malformed."""
    found = value.get(key)
    if not isinstance(found, int) or isinstance(found, bool) or not low <= found <= high:
        raise Malformed(f"field {key!r} is not an integer in [{low}, {high}]")
    return found


def texts(value: dict[str, Any], key: str, *, limit: int = 1024) -> tuple[str, ...]:
    """Return the list of strings under `key` as a tuple; raises Malformed."""
    found = value.get(key)
    if not isinstance(found, list) or len(found) > limit or not all(isinstance(x, str) for x in found):
        raise Malformed(f"field {key!r} is not a list of texts")
    return tuple(found)


@dataclass(frozen=True)
class Subject:
    """Who calls. `person` is the human behind (a service account has its owner's)."""

    id: str
    tenant: str
    kind: str = "person"
    person: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"id": self.id, "tenant": self.tenant, "kind": self.kind, "person": self.person}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        return cls(
            text(value, "id"), text(value, "tenant"), text(value, "kind"), text(value, "person", empty=True)
        )


@dataclass(frozen=True)
class Resource:
    """What is touched: `kind/name` in a tenant, its tier, digests of all ancestor versions."""

    kind: str
    name: str
    tenant: str
    tier: Tier = Tier.NONE
    ancestors: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return ``kind/name``, the object that policy files name."""
        return f"{self.kind}/{self.name}"

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "kind": self.kind, "name": self.name, "tenant": self.tenant, "tier": self.tier.value,
            "ancestors": list(self.ancestors),
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        return cls(
            text(value, "kind"), text(value, "name"), text(value, "tenant"), tier_of(value.get("tier")),
            texts(value, "ancestors"),
        )


@dataclass(frozen=True)
class Call:
    """One request to do one action. `bound` is the digest (of a plan, an order) that it is about."""

    action: Action
    subject: Subject
    resource: Resource
    run: str = ""
    bound: str = ""
    source_ip: str = ""
    id: str = field(default_factory=lambda: new_id("call"))

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "id": self.id, "action": self.action.value, "subject": self.subject.as_json(),
            "resource": self.resource.as_json(), "run": self.run, "bound": self.bound,
            "source_ip": self.source_ip,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed."""
        try:
            action = Action(str(value.get("action")))
        except ValueError:
            raise Malformed("unknown action", code="action") from None
        if not isinstance(value.get("subject"), dict) or not isinstance(value.get("resource"), dict):
            raise Malformed("a call names a subject and a resource")
        return cls(
            action, Subject.from_json(value["subject"]), Resource.from_json(value["resource"]),
            text(value, "run", empty=True), text(value, "bound", empty=True),
            text(value, "source_ip", empty=True), text(value, "id"),
        )

    def digest(self) -> str:
        """Return the digest that a permit and a record are bound to."""
        return digest(self.as_json())


class Effect(StrEnum):
    """What a decision says."""

    ALLOW = "allow"
    DENY = "deny"


@dataclass(frozen=True)
class Decision:
    """The answer of policy to one call.

    `code` is the stable reason (``allowed``, ``no_match``, ``deny_rule``, ``step_up``, ``approval``,
    ``stale``, ``error``); `rules` are the deciding rules; `bundle` the digest of the bundle that decided;
    `needs` how many more persons must approve.
    """

    effect: Effect
    code: str
    message: str
    rules: tuple[str, ...] = ()
    bundle: str = ""
    next_step: str = ""
    needs: int = 0

    @property
    def allowed(self) -> bool:
        """Return True for ALLOW only."""
        return self.effect is Effect.ALLOW

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "effect": self.effect.value, "code": self.code, "message": self.message, "rules": list(self.rules),
            "bundle": self.bundle, "next_step": self.next_step, "needs": self.needs,
        }
