"""Profile → argv of bubblewrap. Pure: nothing is looked up or run, the same profile gives the same list.

Every source is a path below SOURCES, where `enter.py` has bound what it opened and checked as root: the
run's own uid, under which bubblewrap works, could not reach a source in a closed folder.

`--die-with-parent` is left out on purpose. It is tied to the THREAD that started bubblewrap, so the end of a
worker thread would kill a run, and a signal between its two processes can leave the inner one waiting for the
outer for ever. Run init watches a pipe of the launcher instead (beside the supervisor's), which has neither
fault: the launcher's death ends the run by end of file.
"""

from dataclasses import dataclass

from sandbox.profile import INIT_ROOT, SHM, TMP, WORK, Mount, Profile

SOURCES = "/run/interlock-sources"


@dataclass(frozen=True)
class Descriptors:
    """Numbers of the descriptors that bubblewrap and run init inherit."""

    seccomp: int
    info: int
    init: int


def source(index: int) -> str:
    """Return where the source of mount number `index` (mounts, then sockets) lies for bubblewrap."""
    return f"{SOURCES}/{index}"


def disk(part: str) -> str:
    """Return where a part of the run's writable disk (``work``, ``tmp``, ``shm``) lies for bubblewrap."""
    return f"{SOURCES}/disk/{part}"


def _mount(index: int, mount: Mount) -> list[str]:
    match mount.kind:
        case "symlink":
            return ["--symlink", mount.source, mount.target]
        case "rw":
            return ["--bind", source(index), mount.target]
        case _:
            return ["--ro-bind", source(index), mount.target]


def _under_disk(mount: Mount) -> bool:
    """Whether the run's own disk would cover it: a host may keep an environment below its /work or /tmp."""
    return mount.target.startswith((f"{WORK}/", f"{TMP}/"))


def argv(profile: Profile, descriptors: Descriptors, bwrap: str = "/usr/bin/bwrap") -> list[str]:
    """Return the whole command line, run init included.

    `bwrap` is an absolute path: PATH belongs to whoever calls. Refuses nothing: profile.py has.
    """
    out = [bwrap, "--unshare-all", "--unshare-user", "--disable-userns", "--cap-drop", "ALL"]
    out += ["--new-session", "--as-pid-1", "--hostname", "run", "--clearenv"]
    for name, value in profile.env:
        out += ["--setenv", name, value]
    rows = list(enumerate((*profile.mounts, *profile.sockets)))
    for index, mount in rows:
        out += [] if _under_disk(mount) else _mount(index, mount)
    # A uid that equals the owner of a sysctl may write it without any capability: hence the second line.
    out += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
    out += ["--bind", disk("shm"), SHM, "--remount-ro", "/dev"]
    out += ["--bind", disk("work"), WORK, "--bind", disk("tmp"), TMP]
    for index, mount in rows:
        out += _mount(index, mount) if _under_disk(mount) else []
    for name in profile.shape.protected:
        out += ["--tmpfs", f"{WORK}/{name}", "--remount-ro", f"{WORK}/{name}"]
    out += ["--remount-ro", "/", "--chdir", profile.cwd]
    out += ["--seccomp", str(descriptors.seccomp), "--info-fd", str(descriptors.info), "--"]
    return [*out, profile.python, "-I", "-S", f"{INIT_ROOT}/init.py", str(descriptors.init)]
