"""What a program of ours must be able to read when it runs under a user of its own: see drop.py."""

import sys
from importlib.util import find_spec
from pathlib import Path

from interlock.errors import Unavailable

PACKAGES = ("interlock", "policy", "audit", "kms", "sandbox", "killswitch", "runners", "control_plane", "migrations")


def package_folders() -> list[Path]:
    """Return the folders of our packages, wherever they are installed; raises Unavailable.

    One by one and never the folder above: a checkout may be closed to others, and holds more than code.
    """
    found = []
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            raise Unavailable(f"the package {name} is not installed", code="package", next_step="run make setup")
        found.append(Path(next(iter(spec.submodule_search_locations))).resolve())
    return found


def reach() -> list[Path]:
    """Return interpreter, environment and packages, without those that lie below another one."""
    found: list[Path] = []
    for path in sorted({Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve(), *package_folders()}):
        if not any(path.is_relative_to(above) for above in found):
            found.append(path)
    return found
