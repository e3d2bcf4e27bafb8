"""Judge a profile before anything runs in it: every probe of `probes.py`, one process each.

One ESCAPED, INVALID or INCONCLUSIVE refuses the launch. Reports are cached per (what the probes depend on,
boot id): a reboot or another filter asks again. `control` runs one probe with the layers removed that it
names; a control is the proof that the probe can succeed at all, and it never runs anything but our probes.
"""

import json
import os
import platform
import uuid
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from interlock.canon import canonical
from interlock.durable import write_over
from interlock.errors import LayerMissing
from sandbox import bwrap, layers, seccomp, start, work
from sandbox.cgroup import Tree
from sandbox.probes import PROBES, Probe
from sandbox.profile import WORK, Profile
from sandbox.syscalls import NUMBERS
from sandbox.trial import put_down, read_output, trial

PIDS, INODES, DISK_MB, MEMORY_MB = 24, 600, 4, 256
_EACH_S = 15.0
_WORDS = ("BLOCKED", "ESCAPED", "INVALID")
_CACHE: dict[tuple[str, str], "ProbeReport"] = {}


@dataclass(frozen=True)
class ProbeResult:
    """How one probe ended: BLOCKED, ESCAPED, INVALID or INCONCLUSIVE."""

    id: str
    verdict: str
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {"id": self.id, "verdict": self.verdict, "detail": self.detail}


@dataclass(frozen=True)
class ProbeReport:
    """The verdicts of one profile since one boot. `profile` is `Profile.probed_as()`."""

    profile: str
    shape: str
    boot_id: str
    results: tuple[ProbeResult, ...]

    @property
    def failed(self) -> tuple[ProbeResult, ...]:
        """Return everything but BLOCKED."""
        return tuple(r for r in self.results if r.verdict != "BLOCKED")

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object."""
        return {
            "profile": self.profile, "shape": self.shape, "boot_id": self.boot_id,
            "results": [r.as_json() for r in self.results],
        }


def boot_id() -> str:
    """Return the id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def judge(output: bytes) -> tuple[str, str]:
    """Return (verdict, detail) of a probe's output: the first verdict word at the start of a line counts."""
    for line in output.decode(errors="replace").splitlines():
        word, _, rest = line.partition(" ")
        if word in _WORDS:
            return word, rest[:200]
    return "INCONCLUSIVE", "no verdict"


def _small(profile: Profile, times: int = 1) -> Profile:
    bounds = replace(
        profile.bounds, pids=PIDS * times, inodes=INODES * times, work_mb=DISK_MB * times, memory_mb=MEMORY_MB,
        cpu_seconds=30,
    )
    return replace(profile, bounds=bounds)


def _code(probe: Probe) -> str:
    return probe.code(NUMBERS[platform.machine()], PIDS, INODES, DISK_MB)


def _inside(profile: Profile, probe: Probe, tree: Tree, runtime: Path) -> ProbeResult:
    with trial(profile, (profile.python, "-I", "-S", "-c", _code(probe)), tree, runtime) as one:
        output, outcome = one.run(_EACH_S)
    verdict, detail = judge(output)
    if outcome is None and verdict == "BLOCKED":
        return ProbeResult(probe.id, "INCONCLUSIVE", "the probe did not end")
    return ProbeResult(probe.id, verdict, detail)


def run_one(profile: Profile, probe: Probe, tree: Tree, runtime: Path) -> ProbeResult:
    """Run one probe in `profile` (its uid, small limits); raises LayerMissing when nothing can start."""
    return _inside(_small(profile), probe, tree, runtime)


def applying(profile: Profile) -> tuple[Probe, ...]:
    """Return the probes that mean something in `profile`."""
    return tuple(
        p for p in PROBES
        if not (p.void_with_unix and profile.sockets) and not (p.void_with_ranks and profile.ranks > 1)
    )


def run_all(
    profile: Profile, tree: Tree, runtime: Path, *, cache: Path | None = None, fresh: bool = False
) -> ProbeReport:
    """Return the report of `profile`, from the cache when this boot has one and `fresh` is false.

    Args: `profile` with a uid that is free for the time of the call; `tree` where the probes' groups go;
    `runtime` where their disks are mounted; `cache` a root-owned file that survives a restart of the
    program. Raises LayerMissing when a probe cannot be started at all.
    """
    key = (profile.probed_as(), boot_id())
    if not fresh:
        known = _CACHE.get(key) or _from_file(cache, key)
        if known is not None and {r.id for r in known.results} == {p.id for p in applying(profile)}:
            return known  # one of an older version of ours, with other probes, proves nothing
    results = tuple(run_one(profile, probe, tree, runtime) for probe in applying(profile))
    report = ProbeReport(key[0], profile.shape.name, key[1], results)
    _CACHE[key] = report
    if cache is not None:
        _to_file(cache, report)
    return report


def require(report: ProbeReport, profile: Profile) -> None:
    """Refuse with LayerMissing (``layer_missing.probe``) unless `report` is of this profile and boot, has all
    its probes, and every one is BLOCKED."""
    wanted = {p.id for p in applying(profile)}
    current = report.profile == profile.probed_as() and report.boot_id == boot_id()
    failed = [r.id for r in report.failed]
    if failed or not current or {r.id for r in report.results} != wanted:
        said = f"probes not blocked: {', '.join(failed)}" if failed else "the probes of this profile did not run"
        raise LayerMissing(
            f"sandbox profile {profile.shape.name} is not proven on this host: {said}", code="probe",
            next_step="ask `interlock doctor` what this host lacks, then start the node again",
            details={"failed": failed},
        )


def _from_file(cache: Path | None, key: tuple[str, str]) -> ProbeReport | None:
    try:
        if cache is None or os.stat(cache).st_uid != os.geteuid():
            return None
        value = json.loads(cache.read_bytes())[key[0]]
        results = tuple(ProbeResult(r["id"], r["verdict"], r["detail"]) for r in value["results"])
        found = ProbeReport(value["profile"], value["shape"], value["boot_id"], results)
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if (found.profile, found.boot_id) == key and found.results else None


def _to_file(cache: Path, report: ProbeReport) -> None:
    try:
        value = json.loads(cache.read_bytes())
    except (OSError, ValueError):
        value = {}
    kept = value if isinstance(value, dict) else {}
    with suppress(OSError):  # a full disk costs the next start its seconds of probing, and nothing else
        write_over(cache, canonical({**kept, report.profile: report.as_json()}))


def _cut(argv: list[str], *words: str) -> list[str]:
    size = len(words)
    for at in range(len(argv)):
        if tuple(argv[at : at + size]) == words:
            return argv[:at] + argv[at + size :]
    raise ValueError(f"{words} is not in the command line")


_APART = ("--unshare-ipc", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try")


def weaken(argv: list[str], layer: str, protected: tuple[str, ...]) -> list[str]:
    """Return bubblewrap's words without one layer; pure, for controls only."""
    match layer:
        case "filter":
            at = argv.index("--seccomp")
            return argv[:at] + argv[at + 2 :]
        case "userns_limit":
            return _cut(argv, "--disable-userns")
        case "capabilities":
            at = argv.index("--cap-drop")
            return [*argv[:at], "--cap-add", "ALL", *argv[at + 2 :]]
        case "network":
            at = argv.index("--unshare-all")
            return [*argv[: at + 1], "--share-net", *argv[at + 1 :]]
        case "pid_namespace":
            argv = _cut(argv, "--as-pid-1")
            at = argv.index("--unshare-all")
            argv = [*argv[:at], *_APART, *argv[at + 1 :]]
            at = argv.index("--proc")
            return [*argv[:at], "--ro-bind", "/proc", "/proc", *argv[at + 2 :]]
        case "mounts":
            at = argv.index("--proc")
            return [*argv[:at], "--ro-bind", "/var", "/var", *argv[at:]]
        case "root_read_only":
            return _cut(argv, "--remount-ro", "/")
        case "dev_read_only":
            return _cut(argv, "--remount-ro", "/dev")
        case "masks":
            for name in protected:
                argv = _cut(argv, "--tmpfs", f"{WORK}/{name}", "--remount-ro", f"{WORK}/{name}")
            return argv
        case _:  # landlock, init, closed_descriptors: gone because run init and its steps are not in a control
            return argv


def control(profile: Profile, probe: Probe, tree: Tree, runtime: Path) -> ProbeResult:
    """Run `probe` without the layers that it names; ESCAPED is the proof that it can succeed.

    Only our own harmless probes go this way: no workload's argv can come here.
    """
    if probe.control == ("bounds",):
        return _inside(_small(profile, 2), probe, tree, runtime)
    return ProbeResult(probe.id, *judge(_without(probe.control, _small(profile), _code(probe), tree, runtime)))


def _without(removed: tuple[str, ...], profile: Profile, code: str, tree: Tree, runtime: Path) -> bytes:
    """Return the output of one probe's code run with layers removed; cleans up after itself."""
    id_ = f"control_{uuid.uuid4().hex[:12]}.1"
    group = tree.create(id_, profile.bounds.group)
    disk = None
    try:
        disk = work.mount(runtime, id_, profile)
        return _weakly(removed, code, start.StartSpec(profile, (), group, runtime, disk))
    finally:
        put_down(group)
        if disk is not None:
            disk.remove()


def _weakly(removed: tuple[str, ...], code: str, spec: start.StartSpec) -> bytes:
    profile = spec.profile
    with ExitStack() as keep:
        read, write = os.pipe2(os.O_CLOEXEC)
        keep.callback(os.close, read)
        info = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)
        keep.callback(os.close, info)
        filter_fd = start.memory_file("filter", seccomp.program(profile), keep)
        leaked = start.memory_file("leaked", b"", keep)
        argv = bwrap.argv(profile, bwrap.Descriptors(filter_fd, info, 0), layers.find_bwrap())
        argv = [*argv[: argv.index("--") + 1], profile.python, "-I", "-S", "-c", code]
        for layer in removed:
            argv = weaken(argv, layer, profile.shape.protected)
        passed = [filter_fd, info] + ([leaked] if "closed_descriptors" in removed else [])
        process = start.spawn_entered(start.enter_spec(spec, argv, passed), (write, write), keep)
        os.close(write)
        try:
            return read_output(read, _EACH_S)
        finally:
            process.kill()
            process.wait()
