"""Refuse to start when a package of ours comes from somewhere else than our own distribution.

The names policy, audit, kms … are everyday names; a stranger's `policy.py` first on sys.path would decide
for us. Measured cases: docs/decisions/0002-names.md.
"""

import importlib
import json
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse

from interlock.errors import Untrusted

_SERVER = frozenset({"policy", "kms", "audit", "sandbox", "killswitch", "runners", "control_plane", "migrations"})


def _folder(name: str) -> Path:
    """Return the folder that holds the packages of distribution `name` (editable or installed)."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        raise Untrusted(f"the distribution {name} is not installed here", code="origin",
                        next_step="run make setup") from None
    direct = found.read_text("direct_url.json")
    if direct and json.loads(direct).get("dir_info", {}).get("editable"):
        return Path(unquote(urlparse(json.loads(direct)["url"]).path)).resolve()
    return Path(str(found.locate_file(""))).resolve()


def check(*packages: str) -> None:
    """Refuse unless each of `packages` (and interlock itself) comes from our own distributions.

    Raises Untrusted (``untrusted.origin``), also when Python is not isolated (-I).
    """
    if not sys.flags.isolated:
        raise Untrusted("this program runs isolated only", code="origin", next_step="start it with python -I -m …")
    for package in ("interlock", *packages):
        root = _folder("interlock-server" if package in _SERVER else "interlock-guest")
        expected = root if root.name == package and package == "interlock" else root / package
        module = importlib.import_module(package)
        actual = Path(str(module.__file__)).resolve().parent
        if actual != expected:
            raise Untrusted(f"{package} comes from {actual}, not from {expected}", code="origin",
                            next_step="remove what shadows it")
