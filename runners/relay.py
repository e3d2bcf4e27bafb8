"""The second path of heartbeats: when the supervisor's own link is down, the node carries them.

What it carries is the supervisor's: nonces out, signed answers back. It cannot renew anything by itself, and an
answer that it holds back or repeats extends nothing.
"""

import threading

from interlock.errors import Refusal
from killswitch.client import Supervisor
from runners.upstream import Upstream

LOOK_S = 1.0


def carry(supervisor: Supervisor, upstream: Upstream) -> bool:
    """Carry one heartbeat when it is needed; returns whether it was. Raises the refusal of either side."""
    link = supervisor.ask("status").get("link")
    if isinstance(link, dict) and link.get("connected") is True:
        return False
    supervisor.ask("answer", answer=upstream.heartbeat(supervisor.ask("beats")))
    return True


class Relay(threading.Thread):
    """Looks once a second. `carried` counts."""

    def __init__(self, supervisor: Supervisor, upstream: Upstream) -> None:
        super().__init__(name="relay", daemon=True)
        self._supervisor, self._upstream = supervisor, upstream
        self._end = threading.Event()
        self.carried = 0

    def run(self) -> None:
        """Carry until `end`."""
        while not self._end.wait(LOOK_S):
            try:
                self.carried += carry(self._supervisor, self._upstream)
            except Refusal:
                continue  # one of the two is away; the lease runs out if both paths are

    def end(self) -> None:
        """Stop."""
        self._end.set()
        self.join()
