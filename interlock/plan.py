"""The plan of a run: what an approval binds to, byte for byte, by its digest. Page: docs/formats/launch-order.md."""

import re
from dataclasses import dataclass
from typing import Any, Self

from interlock.call import number, text, texts
from interlock.canon import digest
from interlock.errors import Malformed
from interlock.tier import Tier, tier_of

MAX_ARGV = 65_536
MAX_CODE, MAX_DATASETS = 256, 64  # both gates ask, and record, for each dataset
_ENVIRONMENT = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_VERSION = re.compile(r"sha256:[0-9a-f]{64}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")


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
    `valid_s` how long the plan may start runs (critical: at most 7 days); `ranks` processes of a training run;
    `environment` name of an interpreter environment that the node offers (empty: the node's own); `checkpoints`
    whether the run may save and load sealed checkpoints; `weights` digests of the versions that it may load;
    `serve` makes it an engine of the one version in `weights`; `resume` whether the control plane starts it again
    by itself when it fails, within `restarts`.
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
    ranks: int = 1
    environment: str = ""
    checkpoints: bool = False
    weights: tuple[str, ...] = ()
    serve: bool = False
    resume: bool = False

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "argv": list(self.argv), "tier": self.tier.value, "tenant": self.tenant,
            "code": [{"name": n, "digest": d} for n, d in self.code],
            "datasets": [d.as_json() for d in self.datasets], "model": self.model, "pool": self.pool,
            "replicas": self.replicas, "restarts": self.restarts, "pids": self.pids,
            "memory_mb": self.memory_mb, "cpu_seconds": self.cpu_seconds, "work_mb": self.work_mb,
            "output_mb": self.output_mb, "guest": self.guest, "valid_s": self.valid_s,
            "ranks": self.ranks, "environment": self.environment, "checkpoints": self.checkpoints,
            "weights": list(self.weights), "serve": self.serve, "resume": self.resume,
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
        guest, checkpoints, serve, resume = (_flag(full, name) for name in ("guest", "checkpoints", "serve", "resume"))
        found = cls(
            argv, tier, text(full, "tenant", limit=64), _code(full["code"]), _datasets(full["datasets"]),
            text(full, "model", empty=True, limit=256), text(full, "pool", limit=64),
            number(full, "replicas", low=1, high=1), number(full, "restarts", high=100),
            number(full, "pids", low=1, high=4096), number(full, "memory_mb", low=16, high=1 << 20),
            number(full, "cpu_seconds", low=1, high=30 * 86400), number(full, "work_mb", low=1, high=1 << 20),
            number(full, "output_mb", low=1, high=1024), guest,
            number(full, "valid_s", low=1, high=7 * 86400), number(full, "ranks", low=1, high=64),
            _environment(full), checkpoints, _weights(full), serve, resume,
        )
        _check_together(found)
        return found

    def digest(self) -> str:
        """Return the digest that approvals and second factors are bound to."""
        return digest(self.as_json())


def check_new(plan: Plan) -> None:
    """Refuse what no new run may be, though a plan of an older program may say it; raises Malformed.

    A stop covers a model by exactly its name, so no two names look the same; and one launch does not make both gates
    ask and record without end.
    """
    if plan.model and not _MODEL.fullmatch(plan.model):
        raise Malformed("a model is named by letters, digits and . _ : / @ + -", code="model")
    if len(plan.code) > MAX_CODE or len(plan.datasets) > MAX_DATASETS:
        raise Malformed(f"a plan holds at most {MAX_CODE} code files and {MAX_DATASETS} datasets", code="plan",
                        next_step="put the files into one folder, and name that as a dataset")


_PLAN_DEFAULTS: dict[str, Any] = Plan(("x",), Tier.NONE, "x").as_json()
_PLAN_FIELDS = frozenset(_PLAN_DEFAULTS)
for _required in ("argv", "tier", "tenant"):
    del _PLAN_DEFAULTS[_required]


def _flag(value: dict[str, Any], key: str) -> bool:
    found = value.get(key)
    if not isinstance(found, bool):
        raise Malformed(f"field {key!r} is not a boolean")
    return found


def _environment(value: dict[str, Any]) -> str:
    name = text(value, "environment", empty=True, limit=64)
    if name and not _ENVIRONMENT.fullmatch(name):
        raise Malformed("an environment is named by lower-case letters, digits and '-'", code="environment")
    return name


def _weights(value: dict[str, Any]) -> tuple[str, ...]:
    found = texts(value, "weights", limit=8)
    if len(set(found)) != len(found) or not all(_VERSION.fullmatch(w) for w in found):
        raise Malformed("weights are distinct version digests", code="weights",
                        next_step="interlock model list shows them")
    return found


def _check_together(plan: Plan) -> None:
    """Refuse fields that contradict each other; raises Malformed (``malformed.plan``)."""
    if (plan.checkpoints or plan.weights or plan.serve) and not plan.guest:
        raise Malformed("checkpoints and weights come through the broker: the plan needs guest=true", code="plan")
    if plan.serve and (len(plan.weights) != 1 or not plan.model or plan.ranks != 1 or plan.checkpoints):
        raise Malformed("an engine serves one version of one model, and saves nothing", code="plan")
    if plan.resume and not plan.restarts:
        raise Malformed("a run that resumes by itself needs a restart budget", code="plan",
                        next_step="set restarts to 1 or more")


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
