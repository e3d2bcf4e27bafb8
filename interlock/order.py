"""Bodies of the signed orders: stop, resume, launch, lease. Formats: docs/formats/.

Never "order" alone: a stop order, a resume order, a launch order. Labels come from the signed launch
order only, never from what a node reports.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from interlock.call import number, text, texts
from interlock.canon import digest
from interlock.errors import Malformed
from interlock.tier import Tier, tier_of

MAX_ARGV = 65_536


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
class Dataset:
    """A host path of the node, bound read-only at `/data/<name>` inside."""

    name: str
    path: str

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"name": self.name, "path": self.path}


@dataclass(frozen=True)
class Plan:
    """What an approval binds to, by digest. A byte outside the plan needs a new approval.

    `code` maps file names (no slash) to ``sha256:`` digests of files bound at `/code`; `argv` is the
    command inside; `datasets` are read-only; `pids`, `memory_mb`, `cpu_seconds`, `work_mb`, `output_mb`
    are limits; `restarts` the restart budget; `guest` whether the broker's socket is bound in;
    `valid_s` how long the plan may start runs (critical: at most 7 days).
    """

    argv: tuple[str, ...]
    tier: Tier
    tenant: str
    code: tuple[tuple[str, str], ...] = ()
    datasets: tuple[Dataset, ...] = ()
    model: str = ""
    pool: str = "default"
    replicas: int = 1
    restarts: int = 0
    pids: int = 256
    memory_mb: int = 1024
    cpu_seconds: int = 3600
    work_mb: int = 256
    output_mb: int = 16
    guest: bool = False
    valid_s: int = 86_400

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "argv": list(self.argv), "tier": self.tier.value, "tenant": self.tenant,
            "code": [{"name": n, "digest": d} for n, d in self.code],
            "datasets": [d.as_json() for d in self.datasets], "model": self.model, "pool": self.pool,
            "replicas": self.replicas, "restarts": self.restarts, "pids": self.pids,
            "memory_mb": self.memory_mb, "cpu_seconds": self.cpu_seconds, "work_mb": self.work_mb,
            "output_mb": self.output_mb, "guest": self.guest, "valid_s": self.valid_s,
        }

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse `as_json`; raises Malformed. Unknown fields are refused, not ignored."""
        if not isinstance(value, dict):
            raise Malformed("a plan is not an object")
        unknown = set(value) - _PLAN_FIELDS
        if unknown:
            raise Malformed(f"unknown field of a plan: {sorted(unknown)[0]}")
        full = {**_PLAN_DEFAULTS, **value}
        argv = texts(full, "argv", limit=256)
        if not argv or not argv[0]:
            raise Malformed("a plan names a command", code="argv")
        if any("\0" in word for word in argv) or sum(len(word) for word in argv) > MAX_ARGV:
            raise Malformed(f"a command has no NUL and at most {MAX_ARGV} characters", code="argv",
                            next_step="put long text into a code file")
        tier = tier_of(full.get("tier"))
        if not isinstance(full["guest"], bool):
            raise Malformed("field 'guest' is not a boolean")
        return cls(
            argv, tier, text(full, "tenant", limit=64), _code(full["code"]), _datasets(full["datasets"]),
            text(full, "model", empty=True, limit=256), text(full, "pool", limit=64),
            number(full, "replicas", low=1, high=1), number(full, "restarts", high=100),
            number(full, "pids", low=1, high=4096), number(full, "memory_mb", low=16, high=1 << 20),
            number(full, "cpu_seconds", low=1, high=30 * 86400), number(full, "work_mb", low=1, high=1 << 20),
            number(full, "output_mb", low=1, high=1024), full["guest"],
            number(full, "valid_s", low=1, high=7 * 86400),
        )

    def digest(self) -> str:
        """Return the digest that approvals and second factors are bound to."""
        return digest(self.as_json())


_PLAN_DEFAULTS: dict[str, Any] = Plan(("x",), Tier.NONE, "x").as_json()
_PLAN_FIELDS = frozenset(_PLAN_DEFAULTS)
for _required in ("argv", "tier", "tenant"):
    del _PLAN_DEFAULTS[_required]


def _rows(value: object, fields: frozenset[str]) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(r, dict) and set(r) == fields for r in value):
        raise Malformed(f"expected a list of objects with {', '.join(sorted(fields))}")
    return value


def _file_name(row: dict[str, Any]) -> str:
    name = text(row, "name", limit=100)
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise Malformed("a name holds a slash or a control character, or starts with a dot", code="name")
    return name


def _code(value: object) -> tuple[tuple[str, str], ...]:
    found = tuple((_file_name(r), text(r, "digest", limit=80)) for r in _rows(value, frozenset({"name", "digest"})))
    if len({n for n, _ in found}) != len(found):
        raise Malformed("a code file occurs twice", code="name")
    return found


def _datasets(value: object) -> tuple[Dataset, ...]:
    found = tuple(Dataset(_file_name(r), text(r, "path")) for r in _rows(value, frozenset({"name", "path"})))
    if len({d.name for d in found}) != len(found) or not all(
        d.path.startswith("/") and "\0" not in d.path for d in found
    ):
        raise Malformed("datasets have distinct names and absolute paths", code="dataset")
    return found


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
