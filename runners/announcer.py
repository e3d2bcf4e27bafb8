"""Tells the control plane which engines are warm: a version counts as served only from then on."""

from collections.abc import Callable

from interlock.errors import Refusal, Unavailable
from runners.gateway_line import GatewayLine
from runners.upstream import Upstream


class Announcer:
    """Args: `gateway` returns the live gateway; `upstream` hears of each ready engine once."""

    def __init__(self, gateway: Callable[[], GatewayLine], upstream: Upstream) -> None:
        self._gateway, self._upstream = gateway, upstream
        self._told: set[tuple[str, int]] = set()

    def turn(self) -> None:
        """Announce what became ready since the last turn. One that is refused is not asked for again; one that could
        not be delivered is. Raises Unavailable."""
        found = [(str(e["run"]), int(e["attempt"]), e["ready"] is True) for e in self._gateway().engines()]
        self._told &= {(run, attempt) for run, attempt, _ in found}
        for run, attempt, ready in found:
            if ready and (run, attempt) not in self._told:
                try:
                    self._upstream.engine_ready(run, attempt)
                except Unavailable:
                    raise
                except Refusal:  # it ended or was stopped meanwhile; others are waiting
                    pass
                self._told.add((run, attempt))
