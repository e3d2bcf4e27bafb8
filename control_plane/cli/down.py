"""`interlock down`: end the programs in order, then remove what a crash may have left: groups, mounts, files.

Idempotent: what is gone already is not an error. Only what this site noted as its own is touched, and no
folder is cleared while anything is still mounted below it.
"""

import json
import os
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import typer

from control_plane.cli import programs
from control_plane.cli.invocation import Invocation, RuntimeOption, StateOption
from control_plane.cli.programs import Places
from control_plane.cli.terminal import Terminal, fields, table
from interlock.errors import Malformed, NotConfirmed
from sandbox.cgroup import UNIFIED, Tree

_FILES = (
    "supervisor.sock", "supervisor.lock", "stop-page", "stop-state.json", "join.json", "signer.json", "no-sockets.json",
)
_FOLDERS = ("deadlines", "runs")
_TREE = "interlock-"
UMOUNT_S = 10.0


def noted_tree(places: Places) -> Tree | None:
    """Return the subtree of control groups that this site's supervisor noted at its start; None without one.

    Only a subtree with our name is believed. Raises Malformed (``malformed.groups``) for anything else.
    """
    try:
        paths = json.loads((places.state / "supervisor" / "tree.json").read_bytes())["paths"]
    except (FileNotFoundError, PermissionError):
        return None
    except (ValueError, KeyError, TypeError):
        paths = None
    if not isinstance(paths, dict) or UNIFIED not in paths:
        raise Malformed("the supervisor's note of its control groups cannot be read", code="groups")
    found = {str(key): Path(str(path)) for key, path in paths.items()}
    names = {path.name for path in found.values()}
    if len(names) != 1 or not all(p.is_absolute() and p.name.startswith(_TREE) for p in found.values()):
        raise Malformed("the supervisor's note names control groups that are not ours", code="groups")
    return Tree(names.pop(), {key: str(path.parent) for key, path in found.items()})


def clear_groups(tree: Tree, *, wait_s: float = 5.0) -> int:
    """Kill and remove every left-over group of `tree`; return how many there were.

    Raises NotConfirmed (``not_confirmed.groups``) when something in one of them lives on.
    """
    groups = tree.groups()
    until = time.monotonic() + wait_s
    for group in groups:
        while True:
            with suppress(OSError):
                group.thaw()
            with suppress(OSError):
                group.kill()
            try:
                group.remove()
                break
            except OSError:
                if time.monotonic() > until:
                    raise NotConfirmed(f"the group {group.id} cannot be removed", code="groups",
                                       details={"pids": group.pids()},
                                       next_step="python -I -m killswitch stop --all --reason leftover") from None
                time.sleep(0.02)
    with suppress(OSError):
        tree.remove()
    return len(groups)


def mounts_below(folder: Path, table_file: Path = Path("/proc/self/mountinfo")) -> list[str]:
    """Return the mount points below `folder`, deepest first."""
    start = os.path.realpath(folder) + "/"
    points = []
    for line in table_file.read_text().splitlines():
        point = line.split()[4].encode().decode("unicode_escape")  # \040 is how the kernel writes a space
        if point.startswith(start):
            points.append(point)
    return sorted(points, key=len, reverse=True)


def clear_mounts(folder: Path) -> int:
    """Unmount what is mounted below `folder`; return how many. Raises NotConfirmed when one stays."""
    points = mounts_below(folder)
    for point in points:
        if not _unmounted(["umount", point]):
            _unmounted(["umount", "-l", point])
    left = mounts_below(folder)
    if left:
        raise NotConfirmed(f"{left[0]} cannot be unmounted", code="mounts", next_step=f"umount {left[0]}")
    return len(points)


def _unmounted(argv: list[str]) -> bool:
    try:
        return subprocess.run(argv, capture_output=True, check=False, timeout=UMOUNT_S).returncode == 0
    except subprocess.TimeoutExpired:
        return False  # what is still mounted is looked up and named afterwards


def clear_files(places: Places) -> int:
    """Remove the files of RUNTIME that a site makes; return how many entries went. Never across a mount."""
    gone = 0
    for name in _FOLDERS:
        folder = places.runtime / name
        if folder.is_dir() and not folder.is_symlink() and not mounts_below(places.runtime):
            shutil.rmtree(folder)
            gone += 1
    files = [*(places.runtime / n for n in _FILES), *(places.pid_file(n) for n in programs.ENDING)]
    for path in files:
        with suppress(FileNotFoundError):
            path.unlink()
            gone += 1
    with suppress(OSError):
        places.runtime.rmdir()
    return gone


def take_down(places: Places, terminal: Terminal, *, patience_s: float = 20.0) -> dict[str, Any]:
    """End everything and clear up; return what happened to each program."""
    tree = noted_tree(places)
    ended = []
    for name in programs.ENDING:
        found = programs.running(places, name)
        if found is None:
            ended.append({"name": name, "pid": 0, "how": "was not running"})
            continue
        with terminal.wait(f"ends {name} (pid {found.pid})"):
            how = programs.end(found, wait_s=patience_s)
        ended.append({"name": name, "pid": found.pid, "how": how})
    groups = clear_groups(tree) if tree is not None else 0
    mounts = clear_mounts(places.runtime) if places.runtime.exists() else 0
    files = clear_files(places) if places.runtime.exists() else 0
    return {"state": str(places.state), "programs": ended, "groups": groups, "mounts": mounts, "files": files}


def down(ctx: typer.Context, state_folder: StateOption = None, runtime: RuntimeOption = None) -> None:
    """End all programs of this machine, kill their runs, remove groups, mounts and sockets. The state stays."""
    here = Invocation.of(ctx)
    places = Places.of(state_folder, runtime)
    if not places.site_file.exists():
        here.terminal.note(f"there is no site in {places.state}; name another with --state")
    report = take_down(places, here.terminal)
    shown = [(p["name"], p["pid"] or None, p["how"]) for p in report["programs"]]
    here.terminal.result(report, table("", ["program", "pid", "ended"], shown),
                         fields({k: report[k] for k in ("groups", "mounts", "files")}))
