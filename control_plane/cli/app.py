"""Entry point of the `interlock` command.

It starts itself again with `-I` when Python is not isolated: a `policy.py` beside the user must not become
part of it. Nothing of the command is imported before that, so the first start costs next to nothing.
"""

import os
import sys


def _isolate() -> None:
    """Start again with -I: no current directory, no PYTHON* variables, no user packages."""
    script = os.path.realpath(sys.argv[0])
    words = [script] if os.path.isfile(script) else ["-c", "from control_plane.cli import main; main()"]
    os.execv(sys.executable, [sys.executable, "-I", *words, *sys.argv[1:]])  # noqa: S606 - there is no shell on purpose


def main() -> None:
    """Entry point of the console script."""
    if not sys.flags.isolated:
        _isolate()
    from control_plane.cli.command import execute
    from control_plane.cli.terminal import Terminal
    from interlock import origin
    from interlock.errors import Refusal

    try:
        origin.check("control_plane", "killswitch", "policy", "audit", "sandbox")
    except Refusal as refusal:
        sys.exit(Terminal("--json" in sys.argv).refuse(refusal))
    sys.exit(execute(sys.argv[1:]))
