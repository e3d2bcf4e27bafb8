"""The door: raw ASGI. What is wrong with a request before anybody looks at who sent it, and where it goes.

The gateway listens on loopback only, yet a web page in a browser of this host can reach loopback: so the Host must be
one of ours (no other name may be pointed at us), and a body must say that it is JSON (a page cannot send that to
another origin without asking first, and nobody answers that question).
"""

import asyncio
import re
import sys
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from interlock.errors import Refusal, Unavailable
from runners.inference import answers, openapi
from runners.inference.body import LIMIT, malformed
from runners.inference.calls import Calls, OnRecordError
from runners.inference.evidence import Evidence
from runners.inference.exchange import Exchange, Gone, Receive, Scope, Send
from runners.inference.routes import route_of

HEAD_S = 15.0
REST_S = 35.0  # a little more than runners/inference/exchange.py gives a body that it reads
CONNECTIONS = 1_024
HEAD_BYTES = 64 << 10
MESSAGE_BYTES = 2 * LIMIT  # head, body, and what is sent around them: sizes of chunks, trailers
_HOST = re.compile(rb"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]{1,5})?")
_JSON = re.compile(rb"application/json(\s*;.*)?", re.IGNORECASE)


class Front:
    """The ASGI application. Args: `calls` the stages of a call; `evidence` the records."""

    def __init__(self, calls: Calls, evidence: Evidence) -> None:
        self._calls, self._evidence = calls, evidence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request. Nothing that goes wrong here says anything of its content, not even in a log."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        try:
            await self._serve(exchange)
        except Gone:
            return
        except OnRecordError as told:
            await exchange.refuse(told.refusal)
        except Refusal as refusal:
            self._evidence.counted(None, exchange.source, refusal)
            await exchange.refuse(refusal)
        except Exception as fault:
            sys.stderr.write(f'{{"error": "a call failed: {type(fault).__name__}"}}\n')
            await exchange.refuse(Unavailable("the gateway failed", code="fault", next_step="tell an administrator"))

    async def _serve(self, exchange: Exchange) -> None:
        if not _HOST.fullmatch(exchange.header(b"host") or b""):
            raise malformed("the Host is none of this gateway", "host")
        route = route_of(exchange.method, exchange.path)
        if exchange.query:
            raise malformed("no route takes a query", "query")
        match route.kind:
            case "health":
                await exchange.reply({"ok": True})
            case "document":
                await exchange.reply(openapi.document())
            case "models":
                await exchange.reply(answers.models(self._calls.directory.listed(self._calls.admit(exchange))))
            case kind:
                _check_form(exchange)
                await self._calls.infer(exchange, kind)


def _check_form(exchange: Exchange) -> None:
    if not _JSON.fullmatch(exchange.header(b"content-type") or b""):
        raise malformed("the body is not application/json", "content_type")
    if (exchange.header(b"content-encoding") or b"identity").lower() != b"identity":
        raise malformed("the body is compressed", "content_encoding")


class Patient(HttpToolsProtocol):
    """HTTP/1.1 for a small door: a bound on open connections, a time for each part of a request, no pipelining.

    A client that sends its next request before it has the answer would hide from us that it left. When all
    connections are taken, the one goes that has been open longest without a call: connections cost their holder
    nothing, so whoever holds them all must not keep out the caller who has something to ask.
    """

    _late: asyncio.TimerHandle | None = None
    _idle_since = 0.0
    _in_head, _bytes = True, 0

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request; make room for it, or turn it away."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        if len(self.connections) > CONNECTIONS:
            idle = [c for c in self.connections if isinstance(c, Patient) and c is not self and c.idle]
            longest = min(idle, key=lambda c: c._idle_since, default=self)
            longest.transport.abort()
            self.connections.discard(longest)
            if longest is self:
                return
        self._wait(HEAD_S)

    @property
    def idle(self) -> bool:
        """Return whether no call is under way on it."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        """An answer is out: from now on it is idle."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def data_received(self, data: bytes) -> None:
        """Read on, within bounds: a parser keeps what belongs to no body for as long as it comes."""
        self._bytes += len(data)
        if self._bytes > (HEAD_BYTES if self._in_head else MESSAGE_BYTES):
            self.transport.abort()
            return
        super().data_received(data)

    def on_message_begin(self) -> None:
        """Begin to wait for the head; a request before the answer to the last one ends the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # said here: the connection's end is told to its newest request alone
            self.cycle.message_event.set()
            self.transport.abort()
        super().on_message_begin()
        self._in_head, self._bytes = True, 0
        self._wait(HEAD_S)

    def on_headers_complete(self) -> None:
        """The head is whole: begin to wait for the rest, which goes on arriving even when nobody reads it."""
        super().on_headers_complete()
        self._in_head = False
        self._wait(REST_S)

    def on_message_complete(self) -> None:
        """The request is whole; how long its answer takes is not the connection's matter."""
        super().on_message_complete()
        self._wait(0)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing further."""
        self._wait(0)
        super().connection_lost(exc)

    def _wait(self, seconds: float) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if seconds:
            self._late = self.loop.call_later(seconds, self.transport.abort)
