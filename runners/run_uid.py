"""A uid for one run, with patience for strangers: another program of this host may begin to use the uid that the
pool has just found free. Then nothing was started, and the next uid is tried."""

from collections.abc import Callable
from typing import TypeVar

from interlock.errors import LayerMissing, Usage
from sandbox.uids import FIRST, LAST, Pool

TRIES = 3
_T = TypeVar("_T")


def uid_range(words: str) -> tuple[int, int]:
    """Parse ``FIRST-LAST``, a part of 60100-60999; raises Usage (``usage.uids``)."""
    first, dash, last = words.partition("-")
    if dash and first.isdigit() and last.isdigit() and FIRST <= int(first) <= int(last) <= LAST:
        return int(first), int(last)
    raise Usage(f"{words} is no range within {FIRST}-{LAST}", code="uids", next_step=f"use --uids {FIRST}-{LAST}")


def with_uid(pool: Pool, use: Callable[[int], _T]) -> _T:
    """Return what `use` makes of a free uid, which stays taken; on any refusal it goes back to the pool.

    Raises what `use` raises, ``layer_missing.uid`` only after three uids were in use.
    """
    for left in range(TRIES - 1, -1, -1):
        uid = pool.take()
        try:
            return use(uid)
        except BaseException as refusal:
            pool.release(uid)
            if not isinstance(refusal, LayerMissing) or refusal.code != "layer_missing.uid" or not left:
                raise
    raise AssertionError("unreachable")
