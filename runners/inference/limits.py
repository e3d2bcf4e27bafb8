"""How often and how much at once: pure rules on a clock that is given to them, with bounded memory.

A rate is kept as one number for each caller (GCRA): the instant at which his burst would be whole again. That instant
moves on by one interval a call; a call that would move it further ahead than the burst allows is refused and moves
nothing. So in any span of time T at most burst + rate · T calls are admitted, whatever their pattern.
"""

import ipaddress
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from interlock.errors import TooMany, Unavailable

SECOND_NS = 1_000_000_000
MOST_CALLERS = 65_536


@dataclass(frozen=True)
class Allowance:
    """`per_s` calls a second on average, `burst` at once, `together` open at the same time."""

    per_s: int
    burst: int
    together: int

    @property
    def interval_ns(self) -> int:
        """Return the time that one call takes up, rounded up: rounding never gives a call away."""
        return -(-SECOND_NS // self.per_s)


ANONYMOUS = Allowance(per_s=3, burst=3, together=2)
KEY = Allowance(per_s=50, burst=100, together=16)
PERSON = Allowance(per_s=200, burst=400, together=64)  # all keys of one human: he may have 50 of them
TOGETHER = 512


class Rates:
    """The rates of all callers. Not thread-safe: one event loop asks.

    Args: `most` how many callers are remembered. One whose burst is whole again needs no memory and is forgotten;
    when all of them do need it, a newcomer is refused: forgetting somebody would lift his limit.
    """

    def __init__(self, most: int = MOST_CALLERS) -> None:
        self._most = most
        self._whole_ns: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._whole_ns)

    def take(self, caller: str, allowance: Allowance, now_ns: int) -> None:
        """Admit one call of `caller` at `now_ns` (CLOCK_BOOTTIME). Raises TooMany (``too_many.rate``) with
        `retry_after_s` in its details."""
        interval = allowance.interval_ns
        whole = max(self._whole_ns.get(caller, 0), now_ns)
        wait = whole + interval - now_ns - allowance.burst * interval
        if wait > 0:
            raise too_many("too many calls a second", "rate", wait)
        if caller not in self._whole_ns and len(self._whole_ns) >= self._most:
            self._forget(now_ns)
        self._whole_ns[caller] = whole + interval

    def _forget(self, now_ns: int) -> None:
        self._whole_ns = {c: at for c, at in self._whole_ns.items() if at > now_ns}
        if len(self._whole_ns) >= self._most:
            raise too_many("too many callers at once", "rate", SECOND_NS)


class Slots:
    """Calls that are open now, for each caller and in all (`held`)."""

    def __init__(self, together: int = TOGETHER) -> None:
        self._together = together
        self._open: Counter[str] = Counter()
        self.held = 0

    @contextmanager
    def hold(self, *limits: tuple[str, Allowance]) -> Iterator[None]:
        """Hold one slot while the block runs, however it ends; it counts under each name of `limits`.

        Raises TooMany (``too_many.concurrent``) or, when the gateway itself is full, Unavailable
        (``unavailable.busy``).
        """
        for caller, allowance in limits:
            if self._open[caller] >= allowance.together:
                raise too_many(f"more than {allowance.together} calls at once", "concurrent", SECOND_NS)
        if self.held >= self._together:
            raise Unavailable("the gateway has too many calls at once", code="busy", next_step="try again in a second")
        names = [caller for caller, _ in limits]
        self._open.update(names)
        self.held += 1
        try:
            yield
        finally:
            self.held -= 1
            self._open.subtract(names)
            self._open += Counter()  # forgets whoever holds none


def too_many(words: str, code: str, wait_ns: int) -> TooMany:
    """Return the refusal of a caller who has to wait `wait_ns`, in whole seconds, rounded up."""
    seconds = max(1, -(-wait_ns // SECOND_NS))
    return TooMany(words, code=code, next_step=f"try again in {seconds} s", details={"retry_after_s": seconds})


def source_of(address: str) -> str:
    """Return the name under which callers from `address` share a limit: IPv4 alone, IPv6 by its /64, all of loopback
    together: whoever is on this host may call from any of its 16 million addresses."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return "unknown"  # all of them together
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    if found.is_loopback:
        return "loopback"
    if isinstance(found, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((int(found) >> 64 << 64, 64)))
    return str(found)
