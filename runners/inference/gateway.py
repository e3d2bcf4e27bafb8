"""The gateway, joined from its parts; and what the launcher may tell it: open, close, engines.

It holds no weights, no run keys and no key of a person: hashes of API keys, the policy bundle, and one listening
socket for each engine.
"""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

from interlock.call import Action, number, text
from interlock.errors import Malformed, Untrusted
from interlock.event import Event, EventType, Written
from interlock.order import Labels
from interlock.permit import boottime_ms, unseal
from killswitch.page import StopPage
from runners.inference.calls import Calls
from runners.inference.directory import Directory, View
from runners.inference.evidence import Evidence
from runners.inference.front import Front
from runners.inference.pool import Engine, Pool
from runners.inference.stops import Stops

INCIDENT_MS = 1_000
SUM_UP_S = 1.0


class Gateway:
    """One gateway, in one event loop.

    Args: `view` what it may decide with; `page` the stop page; `record` returns when an event is durable; `node` the
    id of this node; `key` the permit key of this start. `app` is the ASGI application.
    """

    def __init__(
        self, view: View, page: StopPage, record: Callable[[Event], Written], node: str, key: bytes
    ) -> None:
        self._key, self.stops = key, Stops(page)
        self.evidence = Evidence(record)
        self.pool = Pool(self._incident)
        self.calls = Calls(Directory(view), self.stops, self.pool, self.evidence, node)
        self.app = Front(self.calls, self.evidence)
        self._incident_ms = -INCIDENT_MS

    async def obey(self, request: dict[str, Any], listener: socket.socket | None) -> dict[str, Any]:
        """Carry out one message of the launcher and return the answer.

        Args: `listener` the socket that came with it; it is taken over or closed. Raises Malformed, Untrusted
        (``untrusted.permit``), Conflict, Halted.
        """
        try:
            op = request.get("op")
            if op == "engines":
                return {"ok": True, "engines": self.pool.engines()}
            run, attempt = text(request, "run"), number(request, "attempt", low=1)
            if op == "close":
                self.pool.close(run, attempt)
                return {"ok": True}
            if op != "open" or listener is None:
                raise Malformed("the gateway opens, closes and lists engines; one socket comes with open", code="wire")
            self._check_permit(request, run)
            engine = Engine(run, attempt, number(request, "uid", low=1), Labels.from_json(request.get("labels")),
                            text(request, "version", limit=80))
            if engine.labels.run != run:
                raise Malformed("labels and run differ", code="wire")
            taken, listener = listener, None
            await self.pool.open(engine, taken)
            return {"ok": True}
        finally:
            if listener is not None:
                listener.close()

    def _check_permit(self, request: dict[str, Any], run: str) -> None:
        permit = unseal(text(request, "permit", limit=16_384), self._key)
        if permit.action not in (Action.SERVE, Action.RESTART) or permit.run != run:
            raise Untrusted("the permit is for something else", code="permit")
        permit.check(permit.action, text(request, "resource"), epoch=self.stops.epoch())

    def _incident(self, engine: Engine, facts: dict[str, Any]) -> None:
        """Record what must not happen, at most once a second: nobody may fill the disk by it."""
        now = boottime_ms()
        if now - self._incident_ms >= INCIDENT_MS:
            self._incident_ms = now
            labels = engine.labels
            self.evidence.note(Event(EventType.INCIDENT, labels.subject, labels.tenant, engine.run, facts=facts))

    async def sum_up(self) -> None:
        """Write counted refusals, for ever; a task of whoever serves."""
        while True:
            await asyncio.sleep(SUM_UP_S)
            self.evidence.sum_up()

    async def close(self) -> None:
        """Hang up on every engine, which ends every call, and return when all records are written."""
        self.pool.close_all()
        await self.evidence.close()
