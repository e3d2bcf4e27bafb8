"""Where a site lies when nobody says so (docs/decisions/0001-seams.md §1): the same for every program.

A stop from a shell must find the supervisor that `interlock up` started; so there is one rule and one file.
"""

import os
from pathlib import Path

SYSTEM_STATE, SYSTEM_RUNTIME = Path("/var/lib/interlock"), Path("/run/interlock")
SOCKET_BYTES = 100  # the kernel takes 107; a little room for what comes below


def default_state() -> Path:
    """Return STATE when no option names it: the system's for root, else the person's own."""
    if os.geteuid() == 0:
        return SYSTEM_STATE
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "interlock"


def default_runtime(state: Path) -> Path:
    """Return RUNTIME when no option names it: it goes with STATE, not with who asks."""
    return SYSTEM_RUNTIME if state == SYSTEM_STATE else state / "run"


def too_long(socket: Path) -> bool:
    """Return whether the path of a unix socket is over `SOCKET_BYTES`."""
    return len(os.fsencode(socket)) > SOCKET_BYTES
