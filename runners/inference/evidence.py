"""What a gateway records: every answer, every refusal; never a prompt, an answer or a key.

`gate.decided` is written by the gate itself, before an engine is asked. Here come `infer.answered` at the end of each
call that was dispatched, and `infer.refused`. Refusals before anybody is known (no such route, no such key) and those
for too many calls are summed up: one record a second for each source and code, with a count, so that noise cannot
fill the disk of the records.
"""

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from interlock.errors import NotRecorded, Refusal
from interlock.event import Event, EventType, Written
from interlock.permit import boottime_ms
from runners.inference.callers import PUBLIC, Caller

THREADS = 16
EACH_MS = 1_000
MOST_SOURCES = 1_024
UNKNOWN = "unknown"


@dataclass
class _Sum:
    since_ms: int
    caller: Caller | None
    count: int = 0


@dataclass
class Answered:
    """The record of one call, filled while it runs. Digests are ``sha256:``; times in microseconds."""

    call: str
    caller: Caller
    run: str
    facts: dict[str, Any] = field(default_factory=dict)

    def event(self) -> Event:
        """Return the event."""
        return Event(EventType.INFERRED, self.caller.id, self.caller.tenant, self.run, self.call,
                     {"source_ip": self.caller.source, "person": self.caller.person, **self.facts})


class Evidence:
    """Writes through `record` (a spool's), in threads, so that calls share one fsync and none blocks the loop."""

    def __init__(self, record: Callable[[Event], Written], now_ms: Callable[[], int] = boottime_ms) -> None:
        self.record, self._now_ms = record, now_ms
        self.threads = ThreadPoolExecutor(THREADS, thread_name_prefix="record")
        self._sums: dict[tuple[str, str], _Sum] = {}
        self._under_way: set[asyncio.Future[Any]] = set()

    async def durable(self, event: Event) -> None:
        """Return when `event` is durable. Raises NotRecorded. A caller who is cancelled does not cancel it."""
        writing = asyncio.get_running_loop().run_in_executor(self.threads, self.record, event)
        self._keep(writing)
        try:
            await asyncio.shield(writing)
        except NotRecorded:
            raise
        except Refusal as refusal:
            raise NotRecorded(refusal.message, next_step=refusal.next_step) from None

    def note(self, event: Event) -> None:
        """Write `event` soon. Used where nothing is given to anybody, whether or not it succeeds."""
        self._keep(asyncio.get_running_loop().run_in_executor(self.threads, self.record, event))

    def _keep(self, writing: "asyncio.Future[Any]") -> None:
        self._under_way.add(writing)
        writing.add_done_callback(self._written)

    def _written(self, writing: "asyncio.Future[Any]") -> None:
        self._under_way.discard(writing)
        fault = None if writing.cancelled() else writing.exception()
        if fault is not None:
            code = fault.code if isinstance(fault, Refusal) else type(fault).__name__
            sys.stderr.write(f'{{"error": "a record was lost: {code}"}}\n')

    def refused(self, caller: Caller, source: str, code: str, facts: dict[str, str]) -> None:
        """Record a call that reached no engine, by itself."""
        self.note(_refusal(caller, source, code, dict(facts)))

    def counted(self, caller: Caller | None, source: str, refusal: Refusal) -> None:
        """Record a refusal of a kind that may come in floods: the first at once, the others of a second as one."""
        key = (source if caller is None else caller.bucket, refusal.code)
        if key not in self._sums:
            if len(self._sums) >= MOST_SOURCES:
                key = ("others", refusal.code)
            if key not in self._sums:
                self._sums[key] = _Sum(self._now_ms(), caller)
                self.note(_refusal(caller, source, refusal.code, {"count": 1}))
                return
        self._sums[key].count += 1

    def sum_up(self) -> None:
        """Write what was counted for a second; to be called about that often, and at the end."""
        now = self._now_ms()
        for (source, code), found in list(self._sums.items()):
            if now - found.since_ms >= EACH_MS:
                del self._sums[source, code]
                if found.count:
                    self.note(_refusal(found.caller, source, code, {"count": found.count}))

    async def close(self) -> None:
        """Return when everything was written."""
        for found in self._sums.values():
            found.since_ms -= EACH_MS
        self.sum_up()
        await asyncio.gather(*self._under_way, return_exceptions=True)
        self.threads.shutdown()


def _refusal(caller: Caller | None, source: str, code: str, facts: dict[str, Any]) -> Event:
    actor, tenant = (UNKNOWN, PUBLIC) if caller is None else (caller.id, caller.tenant)
    shown = source if caller is None else caller.source
    call = str(facts.get("call", ""))
    rest = {k: v for k, v in facts.items() if k != "call"}
    return Event(EventType.INFER_REFUSED, actor, tenant, call=call, facts={"code": code, "source_ip": shown, **rest})
