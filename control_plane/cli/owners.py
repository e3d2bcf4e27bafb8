"""Who owns what: the two system users, the folders of STATE and RUNTIME, and the way down from root."""

import grp
import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from control_plane.cli.programs import Places
from interlock.errors import Conflict, LayerMissing, Unavailable
from sandbox.reach import package_folders, reach

CONTROL_USER, BROKER_USER, GATEWAY_USER = "interlock", "interlock-broker", "interlock-gateway"
USERS = (CONTROL_USER, BROKER_USER, GATEWAY_USER)
USERADD_S = 60.0


@dataclass(frozen=True)
class Owner:
    """A system user's numbers."""

    uid: int
    gid: int


def owner(name: str) -> Owner | None:
    """Return the system user, None when there is none. Raises Conflict when it is root's number."""
    try:
        found = pwd.getpwnam(name)
    except KeyError:
        return None
    if found.pw_uid == 0 or found.pw_gid == 0:
        raise Conflict(f"the user {name} is root", code="user", next_step=f"give {name} a uid of its own")
    return Owner(found.pw_uid, found.pw_gid)


def make_user(name: str) -> Owner:
    """Make a system user without home, shell or password; raises LayerMissing or Unavailable."""
    program = shutil.which("useradd", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if program is None:
        raise LayerMissing("useradd is not installed", code="useradd",
                           next_step=f"make the system users {', '.join(USERS)}")
    group = ["--gid", name] if _group_exists(name) else ["--user-group"]
    try:
        said = subprocess.run([program, "--system", *group, "--no-create-home", "--home-dir", "/nonexistent", "--shell",
                               "/usr/sbin/nologin", name], capture_output=True, text=True, check=False,
                              timeout=USERADD_S).stderr.strip()
    except subprocess.TimeoutExpired:
        said = f"useradd took longer than {USERADD_S:.0f} s"
    found = owner(name)
    if found is None:
        raise Unavailable(f"the system user {name} cannot be made: {said[:200]}", code="user",
                          next_step=f"useradd --system {name}")
    return found


def _group_exists(name: str) -> bool:
    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def make_folder(path: Path, mode: int, who: Owner | None) -> None:
    """Make a folder with this mode and owner; an existing one is corrected, a link is refused."""
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if who is not None:
            os.fchown(handle, who.uid, who.gid)
        os.fchmod(handle, mode)
    except PermissionError:
        raise Conflict(f"{path} belongs to somebody else", code="state",
                       next_step="choose another --state, or start as its owner") from None
    finally:
        os.close(handle)


def lay_folders(
    places: Places, control: Owner | None, broker: Owner | None, gateway: Owner | None = None
) -> None:
    """Make STATE and RUNTIME with the owners of 0001-seams §1. The parents stay root's: who owns a folder
    may rename what lies in it, the supervisor's trust included."""
    root = Owner(0, 0) if control is not None else None
    make_folder(places.state, 0o755, root)
    make_folder(places.runtime, 0o755, root)
    make_folder(places.state / "logs", 0o700, root)
    for name in ("control", "orders"):
        make_folder(places.state / name, 0o700, control)
    make_folder(places.state / "trust", 0o755, control)
    if root is not None:
        make_folder(places.state / "shared", 0o755, root)
        make_folder(places.state / "supervisor", 0o700, root)
        make_folder(places.state / "broker", 0o700, broker)
        make_folder(places.state / "gateway", 0o700, gateway)


def dropped(argv: list[str], who: Owner | None, writes: list[Path], reads: list[Path] | None = None) -> list[str]:
    """Return `argv` started under `who` by sandbox/drop.py; `argv` itself when there is nobody to become."""
    if who is None:
        return argv
    drop = next(p for p in package_folders() if p.name == "sandbox") / "drop.py"
    words = [sys.executable, "-I", "-S", str(drop), "--uid", str(who.uid), "--gid", str(who.gid)]
    for path in [*reach(), *(reads or [])]:
        words += ["--reach", str(path)]
    for path in writes:
        words += ["--write", str(path)]
    return [*words, "--", *argv]
