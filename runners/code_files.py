"""Code files of plans on this host, by digest, for as long as an attempt lives that names them.

What nobody uses any more goes: a node that serves for a year would else keep every file it was ever sent. A
restart of a run fetches its files again, and they are verified again.
"""

import threading
from collections import Counter
from pathlib import Path

from interlock.order import LaunchOrder


class CodeFiles:
    """Counts users of each file in `folder`; thread-safe. What an earlier program left is taken away at once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._users: Counter[str] = Counter()
        for path in folder.iterdir():
            path.unlink()

    def hold(self, order: LaunchOrder) -> None:
        """Keep the files of this attempt from now on."""
        with self._lock:
            self._users.update(_names(order))

    def release(self, order: LaunchOrder) -> None:
        """End what `hold` began; files without another user go."""
        with self._lock:
            self._users.subtract(_names(order))
            for name in [n for n, users in self._users.items() if users <= 0]:
                del self._users[name]
                (self._folder / name).unlink(missing_ok=True)


def _names(order: LaunchOrder) -> set[str]:
    # A digest that is off is refused where it is used; here it must not name another file.
    return {d.removeprefix("sha256:") for _, d in order.plan.code if d.removeprefix("sha256:").isalnum()}
