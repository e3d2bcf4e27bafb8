"""What this host isolates, layer by layer, and what a profile needs of it.

A layer that is missing refuses a launch with its name; there is no switch, prompt or fallback that runs
without it. `survey` only looks; `require` refuses.
"""

import ctypes
import functools
import os
import platform
import shutil
import stat
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import interlock
from interlock.errors import LayerMissing, Refusal
from interlock.tier import PROFILES
from sandbox import cgroup, landlock, uids
from sandbox.profile import SHAPES, Host, Mount, Profile, Shape
from sandbox.syscalls import NUMBERS

_LINKS = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_SETTINGS = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_PR_GET_SECCOMP = 21


@dataclass(frozen=True)
class Layer:
    """One layer of this host. `needed` whether every profile needs it; `how` the next step when absent."""

    name: str
    present: bool
    detail: str
    how: str
    needed: bool = True

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of doctor and of node facts."""
        return {"name": self.name, "present": self.present, "detail": self.detail, "how_to_get": self.how}


def _text(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def find_bwrap() -> str:
    """Return the absolute path of a bubblewrap that nobody but root can change.

    Raises LayerMissing (``layer_missing.bwrap``).
    """
    found = shutil.which("bwrap")
    how = "apt-get install bubblewrap"
    if not found:
        raise LayerMissing("bubblewrap is not installed", code="bwrap", next_step=how)
    path = os.path.realpath(found)
    mode = os.stat(path)
    if mode.st_uid != 0 or mode.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise LayerMissing(f"{path} can be changed by others than root", code="bwrap", next_step=how)
    return path


def _bwrap() -> Layer:
    try:
        path = find_bwrap()
        info = os.stat(path)
        return _version(path, info.st_dev, info.st_ino, info.st_size, info.st_ctime_ns)
    except LayerMissing as error:
        return Layer("bwrap", False, error.message, error.next_step)


@functools.lru_cache(maxsize=8)
def _version(path: str, *_file: int) -> Layer:
    """Ask once for each file: every start looks at the layers, and this look starts a process."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
    return Layer("bwrap", done.returncode == 0, done.stdout.strip(), "apt-get install bubblewrap")


def _user_namespaces() -> Layer:
    how = "sysctl user.max_user_namespaces=10000 (and kernel.unprivileged_userns_clone=1 where it exists)"
    most = _text("/proc/sys/user/max_user_namespaces")
    allowed = _text("/proc/sys/kernel/unprivileged_userns_clone") != "0"
    present = most.isdigit() and int(most) > 0 and allowed
    if present and not _one_was_made():
        return Layer("user_namespaces", False, "the kernel made none when asked (inside a chroot it never does)", how)
    return Layer("user_namespaces", present, f"at most {most or 'none'}", how)


@functools.cache
def _one_was_made() -> bool:
    """Try it, once a process: settings allow it on hosts where the kernel refuses all the same."""
    code = ("import ctypes, os, sys\nif os.geteuid() == 0: os.setgid(65534); os.setuid(65534)\n"
            "sys.exit(ctypes.CDLL(None).unshare(0x10000000) != 0)")
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], stdin=subprocess.DEVNULL, capture_output=True,
                          check=False, timeout=10)
    return done.returncode == 0


def _apparmor() -> Layer:
    restricted = _text("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"
    loaded = "interlock-bwrap" in _text("/sys/kernel/security/apparmor/profiles")
    detail = "restricted, profile loaded" if loaded else "restricted" if restricted else "not restricted"
    how = "install deploy/apparmor/interlock-bwrap: cp it to /etc/apparmor.d/ and apparmor_parser -r it"
    return Layer("apparmor_userns", loaded or not restricted, detail, how)


def _seccomp() -> Layer:
    arch = platform.machine()
    known = int(ctypes.CDLL(None).prctl(_PR_GET_SECCOMP, 0, 0, 0, 0)) >= 0
    detail = f"{arch}: {'table' if arch in NUMBERS else 'no table of system calls'}"
    return Layer("seccomp", known and arch in NUMBERS, detail, "a kernel with seccomp filters on x86_64 or aarch64")


def _landlock() -> Layer:
    version = landlock.abi()
    return Layer("landlock", version >= 1, f"ABI {version}", "boot with lsm=landlock,… on kernel 5.13 or newer")


def _cgroups() -> list[Layer]:
    how = "systemd: Delegate=yes; else mount cgroup2 with the controllers pids, memory and cpu"
    try:
        # A name for each look: of two starts at once one would take the other's group away under its eyes.
        tree = cgroup.own_tree(f"interlock-survey-{os.getpid()}-{threading.get_ident()}")
    except Refusal as error:
        return [Layer("cgroup", False, error.message, error.next_step), Layer("cgroup_kill", False, "", how)]
    kind = "unified" if set(tree.own) == {cgroup.UNIFIED} else "hybrid"
    try:
        kill, detail = cgroup.kill_is_there(tree), "cgroup v2"
    except OSError as error:
        kill, detail = False, f"cannot make a group: {error.strerror}"
    return [
        Layer("cgroup", True, f"{kind}; pids, memory, cpu", how),
        Layer("cgroup_kill", kill, detail, "kernel 5.14 or newer, and root"),
    ]


def _uid_range() -> Layer:
    how = "run the node as root: a uid for each run needs CAP_SETUID"
    try:
        uids.check_range(uids.FIRST, uids.LAST)
    except LayerMissing as error:
        return Layer("uid", False, error.message, error.next_step)
    return Layer("uid", os.geteuid() == 0, f"{uids.FIRST}-{uids.LAST}", how)


def _swap() -> Layer:
    on = len(_text("/proc/swaps").splitlines()) > 1
    release = tuple(int(p) for p in platform.release().split("-")[0].split(".")[:2] if p.isdigit())
    bounded = release >= (6, 4)
    detail = f"swap {'on' if on else 'off'}; disks of runs {'noswap' if bounded else 'may be swapped'}"
    return Layer("swap", not on or bounded, detail, "swapoff -a, or kernel 6.4 or newer", needed=False)


def survey() -> list[Layer]:
    """Return every layer with what was found; starts nothing but ``bwrap --version`` and one trial."""
    return [
        _bwrap(), _user_namespaces(), _apparmor(), _seccomp(), _landlock(), *_cgroups(), _uid_range(), _swap(),
    ]


def shape_missing(shape: Shape, found: list[Layer]) -> list[Layer]:
    """Return the layers of `found` that `shape` needs and the host lacks."""
    return [x for x in found if not x.present and (x.needed or (x.name == "swap" and not shape.swap))]


def tiers(found: list[Layer]) -> list[str]:
    """Return the names of the tiers whose sandbox profile this host can give."""
    return [t.value for t, p in PROFILES.items() if not shape_missing(SHAPES[p.sandbox], found)]


def require(profile: Profile, found: list[Layer] | None = None) -> None:
    """Refuse with LayerMissing, code and details naming the first layer that `profile` lacks here."""
    missing = shape_missing(profile.shape, survey() if found is None else found)
    if missing:
        first = missing[0]
        raise LayerMissing(
            f"this host lacks the sandbox layer {first.name}: {first.detail}", code=first.name,
            next_step=first.how, details={"layers": [x.name for x in missing]},
        )
    if landlock.abi() < profile.shape.landlock:
        raise LayerMissing(
            f"Landlock ABI {landlock.abi()} is below {profile.shape.landlock}", code="landlock",
            next_step="use a newer kernel",
        )


def this_host() -> Host:
    """Return what every run on this host is shown; looks at the root folder and at our own installation."""
    system = [Mount("ro", "/usr", "/usr")]
    for name in _LINKS:
        path = Path("/") / name
        if path.is_symlink():
            system.append(Mount("symlink", os.readlink(path), str(path)))
        elif path.is_dir():
            system.append(Mount("ro", str(path), str(path)))
    for name in _SETTINGS:
        if os.path.exists(name):
            system.append(Mount("ro", os.path.realpath(name), name))
    prefix = os.path.realpath(sys.base_prefix)
    python = f"{prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
    here = Path(__file__).resolve().parent
    guest = Path(interlock.__file__).resolve().parent
    return Host(tuple(system), prefix, python, str(here), str(guest))
