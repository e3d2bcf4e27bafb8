"""What a run may touch, as frozen data. Nothing here looks at the host; the digest goes into records.

A `Shape` is what a tier names (standard, strict); a `Profile` is a shape with the mounts, limits and uid of
one run. The tier sets the ceiling: a plan above it is refused, never trimmed. Page:
docs/formats/sandbox-profile.md.
"""

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from interlock import wire
from interlock.canon import digest
from interlock.errors import Denied, Malformed
from interlock.order import Plan
from interlock.tier import PROFILES, Tier
from sandbox.cgroup import Limits

WORK, TMP, SHM = "/work", "/tmp", "/dev/shm"  # noqa: S108 - paths inside the sandbox
GUEST_ROOT = "/opt/interlock-guest"
ENGINE_ROOT = "/opt/interlock-engine"
ENGINE_SOCKET = "/run/interlock/engine.sock"
INIT_ROOT = "/opt/interlock-init"
PROTECTED = (
    ".git", ".github", ".gitlab-ci.yml", ".gitmodules", ".gitattributes", ".circleci", ".vscode", ".idea",
    ".devcontainer", ".envrc", ".pre-commit-config.yaml", ".mcp.json",
)
HIDDEN = ("/proc", "/sys", "/dev", "/run", "/var/run", "/tmp", "/var/tmp", "/boot", "/etc")  # noqa: S108
FIRST_UID = 60_000
MAX_INODES = 1 << 20


@dataclass(frozen=True)
class Mount:
    """One thing made visible. `kind`: ``ro`` or ``rw`` bind, ``symlink``, ``text`` (a file whose content is
    `source`), ``socket`` (one unix socket)."""

    kind: str
    source: str
    target: str

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"kind": self.kind, "source": self.source, "target": self.target}


@dataclass(frozen=True)
class Bounds:
    """Limits of a run: `pids` tasks; `memory_mb` MiB, swap and files of the run included; `cpu_percent` of
    one core or None; `cpu_seconds` of each process; `work_mb` and `inodes` of all writable places together;
    `files` open descriptors of a process; `output_mb` of output kept."""

    pids: int
    memory_mb: int
    cpu_seconds: int
    work_mb: int
    inodes: int
    output_mb: int
    files: int = 1024
    cpu_percent: int | None = None

    @property
    def group(self) -> Limits:
        """Return what the control group enforces."""
        return Limits(self.pids, self.memory_mb, self.cpu_percent)

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "pids": self.pids, "memory_mb": self.memory_mb, "cpu_seconds": self.cpu_seconds,
            "work_mb": self.work_mb, "inodes": self.inodes, "output_mb": self.output_mb, "files": self.files,
            "cpu_percent": self.cpu_percent,
        }


@dataclass(frozen=True)
class Shape:
    """A named kind of isolation. `landlock` is the lowest ABI, `syscalls` the set of refused calls,
    `protected` the names masked in the workspace, `swap` whether pages may reach a disk, `largest` the
    ceiling of a run's limits, `tcp` whether a run may talk to itself by TCP. Network and terminal are always
    ``none``."""

    name: str
    largest: Bounds
    syscalls: str
    landlock: int = 1
    protected: tuple[str, ...] = PROTECTED
    swap: bool = True
    tcp: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "name": self.name, "largest": self.largest.as_json(), "syscalls": self.syscalls,
            "landlock": self.landlock, "protected": list(self.protected), "swap": self.swap, "tcp": self.tcp,
            "net": "none", "terminal": "none",
        }

    def digest(self) -> str:
        """Return the digest under which the probes of this shape are cached."""
        return digest(self.as_json())


STANDARD = Shape(
    "standard", Bounds(4096, 1 << 20, 30 * 86_400, 1 << 20, MAX_INODES, 1024, 65_536), "standard"
)
STRICT = Shape(
    "strict", Bounds(2048, 1 << 20, 30 * 86_400, 1 << 19, MAX_INODES, 256, 16_384), "strict", swap=False,
    tcp=False,
)
SHAPES = {s.name: s for s in (STANDARD, STRICT)}


@dataclass(frozen=True)
class Host:
    """What of the host every run needs: `system` mounts (the read-only /usr and its links), `prefix` of the
    interpreter, `python` its path, `init` the folder of init.py and landlock.py, `guest` the folder
    of the package `interlock`."""

    system: tuple[Mount, ...]
    prefix: str
    python: str
    init: str
    guest: str


@dataclass(frozen=True)
class Environment:
    """A folder with an interpreter and its libraries, shown read-only at its own path and first on PATH.
    `base` is the installation that the interpreter comes from (`home` in its pyvenv.cfg)."""

    name: str
    prefix: str
    base: str


@dataclass(frozen=True)
class EngineSeat:
    """What an engine needs beside a run: `code` the host folder of its programs, `socket` the host path of the
    socket at which it dials the gateway."""

    code: str
    socket: str


@dataclass(frozen=True)
class Profile:
    """The complete isolation of one run. `uid` ≥ 60000 belongs to this run alone; `sockets` non-empty opens
    AF_UNIX; `ranks` > 1 opens NETLINK_ROUTE; `python` is the interpreter of run init."""

    shape: Shape
    uid: int
    bounds: Bounds
    mounts: tuple[Mount, ...]
    env: tuple[tuple[str, str], ...]
    python: str
    sockets: tuple[Mount, ...] = ()
    ranks: int = 1
    cwd: str = field(default=WORK)

    @property
    def syscalls(self) -> str:
        """Return the name of the set of refused calls."""
        return self.shape.syscalls

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "shape": self.shape.as_json(), "uid": self.uid, "bounds": self.bounds.as_json(),
            "mounts": [m.as_json() for m in self.mounts], "env": [f"{k}={v}" for k, v in self.env],
            "python": self.python, "sockets": [s.as_json() for s in self.sockets], "ranks": self.ranks,
            "cwd": self.cwd,
        }

    def digest(self) -> str:
        """Return the digest of the whole profile."""
        return digest(self.as_json())

    def probed_as(self) -> str:
        """Return the digest of what the probes depend on: the shape and which exceptions are open."""
        return digest({"shape": self.shape.digest(), "unix": bool(self.sockets), "netlink": self.ranks > 1})


def _refuse_above(bounds: Bounds, shape: Shape) -> None:
    for name, limit in shape.largest.as_json().items():
        asked = bounds.as_json()[name]
        if limit is not None and asked > limit:
            raise Denied(
                f"the plan asks for {name} {asked}, above the {limit} of profile {shape.name}", code="profile",
                next_step=f"lower {name} in the plan", details={"limit": limit, "asked": asked},
            )


def shape_for(tier: Tier, name: str = "") -> Shape:
    """Return the shape that `tier` demands; a weaker `name` is refused with Denied (``denied.profile``)."""
    demanded = SHAPES[PROFILES[tier].sandbox]
    wanted = SHAPES.get(name or demanded.name)
    if wanted is None:
        raise Malformed(f"unknown sandbox profile {name!r}", code="profile", next_step="use standard or strict")
    if demanded is STRICT and wanted is not STRICT:
        raise Denied(
            f"tier {tier.value} needs sandbox profile {demanded.name}", code="profile",
            next_step=f"ask for {demanded.name}",
        )
    return wanted


def _variables(
    prefixes: Sequence[str], packages: Sequence[str], extra: Sequence[tuple[str, str]]
) -> tuple[tuple[str, str], ...]:
    path = ":".join(dict.fromkeys((*(f"{p}/bin" for p in prefixes), "/usr/local/bin", "/usr/bin", "/bin")))
    own = {
        "PATH": path, "HOME": WORK, "TMPDIR": TMP, "LANG": "C.UTF-8", "USER": "run",
        "PYTHONPATH": ":".join(packages), "PYTHONDONTWRITEBYTECODE": "1",
    }
    return tuple(sorted({**dict(extra), **own}.items()))


def _identity(uid: int) -> tuple[Mount, ...]:
    return (
        Mount("text", f"run:x:{uid}:{uid}:run:{WORK}:/bin/sh\n", "/etc/passwd"),
        Mount("text", f"run:x:{uid}:\n", "/etc/group"),
    )


def refuse_path(path: str, hidden: Sequence[str] = ()) -> None:
    """Refuse a dataset that is, holds or lies in a place no run may see; raises Denied (``denied.path``)."""
    plain = posixpath.normpath(path) == path and path.startswith("/") and not path.startswith("//")
    meets = [h for h in (*HIDDEN, *hidden) if _inside(path, h) or _inside(h, path)]
    if not plain or meets:
        raise Denied(
            f"{path!r} cannot be shown to a run", code="path",
            next_step="give the plain absolute path of a folder outside " + ", ".join(HIDDEN),
        )


def _inside(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def _refuse_contradiction(
    plan: Plan, shape: Shape, broker: str, environment: Environment | None, engine: EngineSeat | None
) -> None:
    if plan.guest != bool(broker):
        raise Malformed("a broker socket goes with a plan that asks for the guest, and only with it", code="guest")
    if plan.environment != ("" if environment is None else environment.name):
        raise Malformed("the environment is not the one that the plan names", code="environment")
    if plan.serve != (engine is not None):
        raise Malformed("an engine's socket goes with a plan that serves, and only with it", code="engine")
    refuse_ranks(plan, shape)


def refuse_ranks(plan: Plan, shape: Shape) -> None:
    """Refuse several ranks where a run cannot talk to itself by TCP; raises Denied (``denied.profile``)."""
    if plan.ranks > 1 and not shape.tcp:
        raise Denied(
            f"sandbox profile {shape.name} has no TCP, so its {plan.ranks} ranks could not meet", code="profile",
            next_step="train with one rank at this tier, or at tier none", details={"limit": 1, "asked": plan.ranks},
        )


def _shown(path: str, mounts: Sequence[Mount]) -> bool:
    return any(m.kind == "ro" and m.source == m.target and _inside(path, m.target) for m in mounts)


def _mounts(
    plan: Plan, uid: int, host: Host, code: str, environment: Environment | None, engine: EngineSeat | None
) -> tuple[Mount, ...]:
    mounts = [*host.system, *_identity(uid)]
    if plan.ranks > 1:  # ranks find one another by the names of this host, which nothing else would resolve
        mounts.append(Mount("text", "127.0.0.1 localhost run\n::1 localhost run\n", "/etc/hosts"))
    for prefix in (host.prefix, *(() if environment is None else (environment.base, environment.prefix))):
        if not _shown(prefix, mounts):
            mounts.append(Mount("ro", prefix, prefix))
    mounts += [Mount("ro", f"{host.init}/{name}", f"{INIT_ROOT}/{name}") for name in ("init.py", "landlock.py")]
    mounts.append(Mount("ro", host.guest, f"{GUEST_ROOT}/interlock"))
    if engine is not None:
        mounts.append(Mount("ro", engine.code, f"{ENGINE_ROOT}/runners/inference"))
    if code:
        mounts.append(Mount("ro", code, "/code"))
    return (*mounts, *(Mount("ro", d.path, f"/data/{d.name}") for d in plan.datasets))


def for_plan(
    plan: Plan, uid: int, host: Host, *, code: str = "", broker: str = "", shape: str = "",
    environment: Environment | None = None, engine: EngineSeat | None = None,
    env: Sequence[tuple[str, str]] = (), hidden: Sequence[str] = (),
) -> Profile:
    """Return the profile of a run of `plan` under `uid`.

    Args: `code` host folder with the plan's code files, bound at /code; `broker` host path of the run's
    broker socket, needed exactly when the plan asks for the guest; `shape` a stronger profile than the
    tier's; `environment` the one that the plan names; `engine` exactly for a plan that serves; `env` further
    variables, which cannot replace ours; `hidden` host folders that no dataset may meet (state and runtime of the
    node). Raises Denied (``denied.profile``) above the tier's ceiling and for several ranks without TCP, Denied
    (``denied.path``), Malformed.
    """
    chosen = shape_for(plan.tier, shape)
    bounds = Bounds(
        plan.pids, plan.memory_mb, plan.cpu_seconds, plan.work_mb, min(MAX_INODES, 1024 + plan.work_mb * 64),
        plan.output_mb,
    )
    _refuse_above(bounds, chosen)
    if uid < FIRST_UID:
        raise Denied(f"uid {uid} is not one of a run's", code="uid", next_step="take one from sandbox.uids")
    _refuse_contradiction(plan, chosen, broker, environment, engine)
    for dataset in plan.datasets:
        refuse_path(dataset.path, hidden)
    prefixes = (host.prefix,) if environment is None else (environment.prefix, host.prefix)
    packages = (GUEST_ROOT,) if engine is None else (GUEST_ROOT, ENGINE_ROOT)
    sockets = [Mount("socket", broker, wire.SOCKET)] if broker else []
    if engine is not None:
        sockets.append(Mount("socket", engine.socket, ENGINE_SOCKET))
    return Profile(
        chosen, uid, bounds, _mounts(plan, uid, host, code, environment, engine), _variables(prefixes, packages, env),
        host.python, tuple(sockets), plan.ranks,
    )
