"""Environments: folders with an interpreter and libraries that `runners serve --environment NAME=PREFIX` offers.

A plan names one; it is shown read-only at its own path, with the installation that its interpreter comes from. All
of it is looked at once, at start: what a run could not read, and a socket that it could reach, are said then and not
by a run that fails an hour later.
"""

import os
import re
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from interlock.errors import NotFound, Unavailable, Usage
from sandbox.profile import TMP, WORK, Environment

MAX_ENTRIES = 400_000
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")
_HOME = re.compile(r"^home\s*=\s*(\S.*?)\s*$", re.MULTILINE)
# Never shown from the host: the sandbox puts its own there, or shows nothing.
_TAKEN = ("/proc", "/sys", "/dev", "/run", "/var/run", "/boot", "/etc")


def environments(pairs: Sequence[str], hidden: Sequence[Path] = ()) -> dict[str, Environment]:
    """Return the environments that ``NAME=PREFIX`` words name.

    Args: `hidden` folders of the node that no run may see. Raises Usage (``usage.environment``) for words that name
    none, Unavailable (``unavailable.environment``) for a folder that a run could not use.
    """
    found: dict[str, Environment] = {}
    for pair in pairs:
        name, _, prefix = pair.partition("=")
        if not _NAME.fullmatch(name) or not prefix.startswith("/") or name in found:
            raise Usage("--environment wants NAME=/ABSOLUTE/FOLDER, each name once", code="environment",
                        next_step="--environment guest=/srv/interlock/.venv-guest")
        found[name] = _read(name, Path(os.path.realpath(prefix)), hidden)
    return found


def chosen(name: str, offered: Mapping[str, Environment]) -> Environment | None:
    """Return the environment that a plan names, None for the node's own interpreter.

    Raises NotFound (``not_found.environment``).
    """
    if not name:
        return None
    if name not in offered:
        raise NotFound(f"this node offers no environment {name!r}", code="environment",
                       next_step="start the node with --environment NAME=PREFIX",
                       details={"offered": sorted(offered)})
    return offered[name]


def _read(name: str, prefix: Path, hidden: Sequence[Path]) -> Environment:
    base = _base(name, prefix)
    for folder in {prefix, base}:
        _refuse_place(name, folder, hidden)
        if not folder.is_relative_to("/usr") and folder != Path(os.path.realpath(sys.base_prefix)):
            _refuse_content(name, folder)  # the two others every run sees as they are
    python = prefix / "bin" / "python"
    real = Path(os.path.realpath(python))
    inside = any(real.is_relative_to(place) for place in (prefix, base, "/usr"))
    if not real.is_file() or not inside or not os.stat(real).st_mode & stat.S_IXOTH:
        raise _unfit(name, f"{python} is no interpreter that a run could start")
    return Environment(name, str(prefix), str(base))


def _base(name: str, prefix: Path) -> Path:
    """Return the installation behind a virtual environment; a folder without pyvenv.cfg is one itself."""
    try:
        text = (prefix / "pyvenv.cfg").read_text()
    except FileNotFoundError:
        return prefix
    except (OSError, ValueError):
        raise _unfit(name, f"{prefix / 'pyvenv.cfg'} cannot be read") from None
    home = _HOME.search(text)
    if home is None:
        raise _unfit(name, f"{prefix / 'pyvenv.cfg'} names no home")
    base = Path(os.path.realpath(home[1])).parent
    return Path("/usr") if base == Path("/") else base  # /bin is a link to /usr/bin


def _refuse_place(name: str, folder: Path, hidden: Sequence[Path]) -> None:
    taken = [Path(p) for p in _TAKEN] + [Path(os.path.realpath(p)) for p in hidden]
    whole = folder in (Path("/"), Path(WORK), Path(TMP))
    if whole or any(folder.is_relative_to(t) or t.is_relative_to(folder) for t in taken):
        raise _unfit(name, f"{folder} cannot be shown to a run")


def _refuse_content(name: str, folder: Path) -> None:
    """Look at every file once; what a run cannot read, and a socket that it could reach, refuse the environment."""
    for seen, (path, mode) in enumerate(_entries(folder)):
        if seen > MAX_ENTRIES:
            raise _unfit(name, f"{folder} has more than {MAX_ENTRIES} files")
        if stat.S_ISSOCK(mode):
            raise _unfit(name, f"{path} is a socket")
        wanted = stat.S_IROTH | stat.S_IXOTH if stat.S_ISDIR(mode) else stat.S_IROTH
        if not stat.S_ISLNK(mode) and mode & wanted != wanted:
            raise _unfit(name, f"{path} cannot be read by others, so not by the uid of a run",
                         f"chmod -R o+rX {folder}")


def _entries(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield every path below `folder`, itself first, with its mode."""
    yield str(folder), os.stat(folder).st_mode
    waiting = [str(folder)]
    while waiting:
        with os.scandir(waiting.pop()) as found:
            for entry in found:
                yield entry.path, entry.stat(follow_symlinks=False).st_mode
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _unfit(name: str, why: str, next_step: str = "") -> Unavailable:
    return Unavailable(f"the environment {name} cannot be offered: {why}", code="environment",
                       next_step=next_step or "name the folder of a virtual environment that everybody may read")
