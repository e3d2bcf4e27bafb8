"""Control groups: the only membership of a run that a workload cannot leave.

Invariants, kept by this file:
1. Everything lies in ONE subtree, `<own cgroup>/NAME`, of each hierarchy; nothing outside it is written
   (on a unified host the single exception is `cgroup.subtree_control` of the own group).
2. Runs are `<own cgroup>/NAME/runs/ID`; programs that move themselves go to `<own cgroup>/NAME/CHILD`.
3. Limits come from the hierarchy that has the controller; kill and freeze always from cgroup v2.
4. No process but the caller itself is ever moved.

Hybrid hosts (v1 controllers, v2 without any) and unified hosts are both covered. The kernel has no lock
to take here: mkdir, rmdir and one write a file are the whole protocol. Source: cgroups(7) and the
kernel's admin guide, cgroup-v2.
"""

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from interlock.errors import LayerMissing, NotFound, Usage

UNIFIED = "unified"
_V1 = ("pids", "memory", "cpu", "freezer")
_NEEDED = ("pids", "memory", "cpu")
_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}$")
_PERIOD_US = 100_000


@dataclass(frozen=True)
class Limits:
    """Bounds of one run: `pids` tasks, `memory_mb` MiB (swap included), `cpu_percent` of one core."""

    pids: int
    memory_mb: int
    cpu_percent: int | None = None


def _write(path: str, value: str) -> None:
    # No O_CREAT: on a file system that is no cgroup the write must fail, not make a file.
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, value.encode())
    finally:
        os.close(fd)


def _try_write(path: str, value: str) -> bool:
    try:
        _write(path, value)
    except OSError:
        return False
    return True


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:  # the group is gone, or going (ENODEV): it holds nothing
        return ""


def _down(path: str) -> Iterator[str]:
    """Yield `path` and every group below it, parents first."""
    yield path
    try:
        with os.scandir(path) as entries:
            below = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    except OSError:
        return
    for child in below:
        yield from _down(child)


def _rmdir_tree(path: str) -> None:
    """Remove `path` and all groups below, children first; raises OSError (EBUSY) while anything lives."""
    for group in reversed(list(_down(path))):
        try:
            os.rmdir(group)
        except FileNotFoundError:
            continue


@dataclass(frozen=True)
class Group:
    """One run's group in every hierarchy. `paths`: hierarchy name → absolute path (v2: ``unified``)."""

    id: str
    paths: dict[str, str] = field(default_factory=dict)

    def kill(self) -> None:
        """SIGKILL everything in the group and below it. Not sticky, and without effect on tasks that a v1
        freezer holds: thaw first, repeat until `remove` succeeds. Raises OSError; a group that is gone is
        no error."""
        try:
            _write(f"{self.paths[UNIFIED]}/cgroup.kill", "1")
        except FileNotFoundError:
            return

    def freeze(self) -> None:
        """Freeze by cgroup v2, whose frozen tasks stay killable (those of a v1 freezer do not)."""
        _write(f"{self.paths[UNIFIED]}/cgroup.freeze", "1")

    def thaw(self) -> None:
        """Thaw v1 and v2, nested groups too; groups that are gone are no error.

        In v1 a frozen group above freezes this one whatever its own state says, so our own folders above the
        run are thawed as well: other runs that were frozen with them go on, which a stop is worth.
        """
        if "freezer" in self.paths:
            for group in (*self._above("freezer"), *_down(self.paths["freezer"])):
                _try_write(f"{group}/freezer.state", "THAWED")
        for group in _down(self.paths[UNIFIED]):
            _try_write(f"{group}/cgroup.freeze", "0")

    def _above(self, hierarchy: str) -> list[str]:
        """Return `NAME` and `NAME/runs` of this group; nothing of ours lies higher, and no other is touched."""
        runs = os.path.dirname(self.paths[hierarchy])
        return [os.path.dirname(runs), runs] if os.path.basename(runs) == "runs" else []

    def frozen(self) -> bool:
        """Return whether v2 reports the whole group frozen."""
        return "frozen 1" in _read(f"{self.paths[UNIFIED]}/cgroup.events")

    def set_pids_max(self, n: int) -> None:
        """Set the task limit; 0 lets nothing new be made. Raises OSError."""
        _write(f"{self.paths.get('pids', self.paths[UNIFIED])}/pids.max", str(n))

    def populated(self) -> bool:
        """Return whether any hierarchy still holds a task. False is no proof of death: only `remove` is."""
        return "populated 1" in _read(f"{self.paths[UNIFIED]}/cgroup.events") or bool(self.pids())

    def pids(self) -> list[int]:
        """Return the pids in any hierarchy of the group, nested groups too, sorted."""
        found: set[int] = set()
        for path in self.paths.values():
            for group in _down(path):
                found.update(int(p) for p in _read(f"{group}/cgroup.procs").split())
        return sorted(found)

    def procs_files(self) -> list[str]:
        """Return the files into which a launcher writes its pid: v2 first, so that a kill sees it at once."""
        order = sorted(self.paths, key=lambda name: name != UNIFIED)
        return [f"{self.paths[name]}/cgroup.procs" for name in order]

    def exists(self) -> bool:
        """Return whether the group exists in any hierarchy."""
        return any(os.path.isdir(path) for path in self.paths.values())

    def remove(self) -> None:
        """Remove the group from all hierarchies, children first: the proof of death.

        Raises OSError (EBUSY) while anything lives in it; then the rest may already be gone, and calling
        again is right. A group that is gone is no error.
        """
        for path in self.paths.values():
            _rmdir_tree(path)


@dataclass(frozen=True)
class Tree:
    """The subtree `NAME` below the caller's own group. `own`: hierarchy name → own path; `carries`: the
    controllers that the unified hierarchy has."""

    name: str
    own: dict[str, str]
    carries: frozenset[str] = frozenset()

    @property
    def paths(self) -> dict[str, str]:
        """Return the root of the subtree in each hierarchy."""
        return {key: f"{path}/{self.name}" for key, path in self.own.items()}

    def _group(self, id_: str) -> Group:
        if not _NAME.match(id_):
            raise Usage(f"{id_!r} cannot name a control group", code="group")
        return Group(id_, {key: f"{path}/runs/{id_}" for key, path in self.paths.items()})

    def create(self, id_: str, limits: Limits) -> Group:
        """Make the group of a run with its limits in force; all or nothing.

        Raises LayerMissing (``layer_missing.cgroup``) when a limit cannot be set, FileExistsError when the
        id was used, Usage for an odd id.
        """
        group = self._group(id_)
        self._prepare()
        made: list[str] = []
        try:
            for path in group.paths.values():
                os.mkdir(path)
                made.append(path)
            self._limit(group, limits)
        except FileExistsError:
            _undo(made)
            raise
        except OSError as error:
            _undo(made)
            raise LayerMissing(
                f"the limits of a control group cannot be set: {error.strerror}", code="cgroup",
                next_step="delegate pids, memory and cpu to this program (systemd: Delegate=yes)",
            ) from None
        return group

    def open(self, id_: str) -> Group:
        """Return the group of that id; raises NotFound."""
        group = self._group(id_)
        if not group.exists():
            raise NotFound(f"no control group {id_}", code="group")
        return group

    def groups(self) -> list[Group]:
        """Return every run's group that exists in any hierarchy, sorted by id."""
        ids: set[str] = set()
        for path in self.paths.values():
            try:
                with os.scandir(f"{path}/runs") as entries:
                    ids.update(e.name for e in entries if e.is_dir(follow_symlinks=False))
            except FileNotFoundError:
                continue
        return [self._group(i) for i in sorted(ids)]

    def enter(self, child: str) -> None:
        """Move the caller, and only the caller, into `NAME/CHILD` of each hierarchy. Raises OSError."""
        if child == "runs" or not _NAME.match(child):
            raise Usage(f"{child!r} cannot name the group of a program", code="group")
        for path in self.paths.values():
            os.makedirs(f"{path}/{child}", exist_ok=True)
            _write(f"{path}/{child}/cgroup.procs", str(os.getpid()))

    def remove(self) -> None:
        """Move the caller back out and remove the whole subtree; raises OSError (EBUSY) while runs live."""
        for key, path in self.own.items():
            _try_write(f"{path}/cgroup.procs", str(os.getpid()))
            _rmdir_tree(self.paths[key])

    def _prepare(self) -> None:
        """Make the folders above the runs; on a unified host enable the controllers on the way down."""
        shared = [c for c in _NEEDED if c in self.carries]
        own, root = self.own[UNIFIED], self.paths[UNIFIED]
        for path in self.paths.values():
            os.makedirs(path, exist_ok=True)
        if shared and not set(shared) <= set(_read(f"{own}/cgroup.subtree_control").split()):
            if str(os.getpid()) in _read(f"{own}/cgroup.procs").split():
                self.enter("self")  # v2 forbids processes beside enabled controllers; others stay put
            _enable(own, shared)
        if shared:
            _enable(root, shared)
        for path in self.paths.values():
            os.makedirs(f"{path}/runs", exist_ok=True)
        if shared:
            _enable(f"{root}/runs", shared)

    def _limit(self, group: Group, limits: Limits) -> None:
        where = {c: group.paths.get(c, group.paths[UNIFIED]) for c in _NEEDED}
        _write(f"{where['pids']}/pids.max", str(limits.pids))
        size = str(limits.memory_mb << 20)
        if "memory" in group.paths:
            _write(f"{where['memory']}/memory.limit_in_bytes", size)
            # Absent where the kernel counts no swap; layers.py refuses high tiers while swap is on then.
            _try_write(f"{where['memory']}/memory.memsw.limit_in_bytes", size)
        else:
            _write(f"{where['memory']}/memory.max", size)
            _try_write(f"{where['memory']}/memory.swap.max", "0")
            _try_write(f"{where['memory']}/memory.oom.group", "1")
        if limits.cpu_percent is None:
            return
        quota = limits.cpu_percent * _PERIOD_US // 100
        if "cpu" in group.paths:
            _write(f"{where['cpu']}/cpu.cfs_period_us", str(_PERIOD_US))
            _write(f"{where['cpu']}/cpu.cfs_quota_us", str(quota))
        else:
            _write(f"{where['cpu']}/cpu.max", f"{quota} {_PERIOD_US}")


def _undo(made: Iterable[str]) -> None:
    for path in made:
        _rmdir_tree(path)


def _enable(path: str, controllers: list[str]) -> None:
    try:
        _write(f"{path}/cgroup.subtree_control", " ".join(f"+{c}" for c in controllers))
    except OSError as error:
        raise LayerMissing(
            f"controllers cannot be enabled below {path}: {error.strerror}", code="cgroup",
            next_step="start in a group of its own: systemd-run --scope -p Delegate=yes COMMAND",
        ) from None


def _mounts(proc: Path) -> dict[str, tuple[str, str]]:
    """Return hierarchy name → (mount point, root inside the hierarchy); the first mount of each counts."""
    found: dict[str, tuple[str, str]] = {}
    for line in (proc / "mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not kind:
            continue
        if kind[0] == "cgroup2":
            found.setdefault(UNIFIED, (fields[4], fields[3]))
        elif kind[0] == "cgroup":
            for name in set(kind[2].split(",")) & set(_V1):
                found.setdefault(name, (fields[4], fields[3]))
    return found


def _memberships(proc: Path) -> dict[str, str]:
    """Return hierarchy name → own path inside the hierarchy, from /proc/self/cgroup."""
    found: dict[str, str] = {}
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            found[UNIFIED] = path
        for name in set(controllers.split(",")) & set(_V1):
            found[name] = path
    return found


def _own_path(mount: tuple[str, str], inside: str, name: str) -> str:
    point, root = mount
    relative = inside.removeprefix(root) if root != "/" else inside
    parts = [p for p in relative.split("/") if p]
    if name in parts:  # the caller lives in the subtree already (a program that entered it)
        parts = parts[: parts.index(name)]
    return "/".join([point.rstrip("/"), *parts])


def own_tree(name: str, *, proc: Path = Path("/proc/self")) -> Tree:
    """Return the subtree `name` below the caller's own control group; makes nothing.

    `proc` is where `cgroup` and `mountinfo` are read. Raises LayerMissing (``layer_missing.cgroup``) when
    cgroup v2 with cgroup.kill, or one of the controllers pids, memory and cpu, is absent.
    """
    if name == "runs" or not _NAME.match(name):
        raise Usage(f"{name!r} cannot name a subtree", code="group")
    try:
        mounts, inside = _mounts(proc), _memberships(proc)
    except OSError:
        mounts, inside = {}, {}
    own = {key: _own_path(mounts[key], inside[key], name) for key in (UNIFIED, *_V1) if key in mounts and key in inside}
    if UNIFIED not in own:
        raise LayerMissing("cgroup v2 is not mounted", code="cgroup", next_step="mount cgroup2 and start again")
    carries = frozenset(_read(f"{own[UNIFIED]}/cgroup.controllers").split())
    for controller in _NEEDED:
        if controller not in own and controller not in carries:
            raise LayerMissing(
                f"no cgroup controller {controller}", code="cgroup",
                next_step=f"enable the {controller} controller for this program's control group",
            )
    return Tree(name, own, carries)


def kill_is_there(tree: Tree) -> bool:
    """Return whether the kernel has cgroup.kill (5.14 or newer); looks into the root of `tree`, which is made
    for the look and removed again when it is empty. Raises OSError."""
    path = tree.paths[UNIFIED]
    os.makedirs(path, exist_ok=True)
    try:
        return os.path.exists(f"{path}/cgroup.kill")
    finally:
        with suppress(OSError):
            os.rmdir(path)
