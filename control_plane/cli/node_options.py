"""What this machine's node is started with: data roots, environments, the gateway's port. Noted beside the state, so
that the next `interlock up` starts it with the same again."""

import json
import re
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from control_plane.cli import programs
from control_plane.cli.programs import NODE, Places
from interlock.errors import Conflict, Malformed, Unavailable, Usage
from sandbox.profile import HIDDEN

GUEST = "guest"
DEFAULT_GATEWAY_PORT = 7072
ENDING_S = 3.0
_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,63}")


@dataclass(frozen=True)
class NodeOptions:
    """`data_roots` are folders, `environments` are ``NAME=PREFIX``."""

    data_roots: list[str]
    environments: list[str]

    def words(self, gateway_port: int) -> list[str]:
        """Return the options of `runners serve`."""
        found = [word for root in self.data_roots for word in ("--data-root", root)]
        found += [word for row in self.environments for word in ("--environment", row)]
        return [*found, "--gateway-port", str(gateway_port)]

    def note(self, places: Places) -> None:
        """Write down what differs from what is noted."""
        for path, value in ((data_roots_file(places), self.data_roots), (environments_file(places), self.environments)):
            if value != noted(path):
                write_open(path, value)


def data_roots_file(places: Places) -> Path:
    """Return the file with the data roots that the node is started with."""
    return places.state / "data-roots.json"


def environments_file(places: Places) -> Path:
    """Return the file with the environments that the node is started with."""
    return places.state / "environments.json"


def noted(path: Path) -> list[str]:
    """Return the noted texts, none when nothing was noted; raises Malformed."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        found = None
    if not isinstance(found, list) or not all(isinstance(row, str) for row in found):
        raise Malformed(f"{path} is no list of texts", code="settings",
                        next_step="remove it, and name every --data-root and --environment again")
    return found


def options(places: Places, data_roots: list[Path], environments: list[str]) -> NodeOptions:
    """Return what was given; without any, what the last start was given, and the guest environment beside ours.

    Raises Usage (no folder, no name), Malformed, or Conflict (``conflict.site``) when the node runs already with
    others: it would not hear of these.
    """
    roots = _chosen(places, data_roots_file(places), [str(folder(p)) for p in data_roots], "data roots", "--data-root")
    named = [environment(row) for row in environments]
    kept = _chosen(places, environments_file(places), named, "environments", "--environment")
    return NodeOptions(roots, kept or default_environment())


def _chosen(places: Places, path: Path, wanted: list[str], what: str, option: str) -> list[str]:
    kept = noted(path)
    if wanted and wanted != kept and programs.running(places, NODE):
        raise Conflict(f"the node runs with other {what}", code="site",
                       next_step=f"interlock down, then interlock up with every {option}")
    return wanted or kept


def default_environment() -> list[str]:
    """Return the guest environment that set-up made beside the one we run in, none when there is none."""
    beside = Path(sys.prefix).parent / ".venv-guest"
    return [f"{GUEST}={beside}"] if (beside / "bin" / "python").exists() else []


def environment(row: str) -> str:
    """Return ``NAME=PREFIX`` with an absolute prefix; raises Usage (``usage.environment``)."""
    name, equals, prefix = row.partition("=")
    path = Path(prefix).absolute()
    if not equals or not _NAME.fullmatch(name) or not (path / "bin" / "python").exists():
        raise Usage("--environment wants NAME=PREFIX, the folder of a Python environment", code="environment",
                    next_step="name the folder that holds bin/python")
    return f"{name}={path}"


def folder(path: Path) -> Path:
    """Return a data root as it is on disk; raises Usage (``usage.data_root``)."""
    if not path.is_dir():
        raise Usage(f"{path} is not a folder", code="data_root", next_step="name a folder that is there")
    real = path.resolve()
    if any(real.is_relative_to(place) for place in HIDDEN):
        raise Usage(f"no run is ever shown {real}", code="data_root",
                    next_step="choose a folder outside " + ", ".join(HIDDEN))
    return real


def refuse_taken(port: int) -> None:
    """Refuse a gateway's port that somebody has: the address that is told to people would be another's. A gateway of
    our own whose node was killed just now ends within `ENDING_S`. Raises Unavailable (``unavailable.port``)."""
    until = time.monotonic() + ENDING_S
    while True:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise Unavailable(
                        f"port {port} cannot be used for the gateway: {error.strerror}", code="port",
                        next_step="end what uses it, or choose another: interlock up --gateway-port") from None
        time.sleep(0.1)


def write_open(path: Path, value: Any) -> None:
    """Write a JSON file that the other users of ours can read; the rename makes it whole or absent."""
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps(value) + "\n")
    fresh.chmod(0o644)
    fresh.replace(path)
