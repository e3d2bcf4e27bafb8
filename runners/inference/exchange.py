"""One HTTP request and its answer, as raw ASGI. Knows of clients that leave or do not read; nothing of models."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from interlock.errors import Refusal
from runners.inference import answers, body

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]

BODY_S = 30.0
STALL_S = 60.0
LOOK_S = 0.25
# Refusals whose HTTP status is not that of their class.
STATUS = {"malformed.method": 405, "malformed.size": 413, "malformed.slow": 408, "unavailable.engine_lost": 502,
          "unavailable.engine_silent": 504}
_STREAM = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache, no-transform",
           "x-accel-buffering": "no"}


class Gone(Exception):
    """The client went away, or stopped reading."""


class Exchange:
    """One request. `begun` says whether the status line is out: then a refusal can only be an event of the stream."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._receive, self._send = receive, send
        self.method, self.path = str(scope["method"]), str(scope["path"])
        self.query = bytes(scope.get("query_string", b""))
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.source = str((scope.get("client") or ("unknown", 0))[0])
        self.begun = self.over = False
        self.extra: dict[str, str] = {}
        self.left = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    def header(self, name: bytes) -> bytes | None:
        """Return the only value of a header, None when there is none, empty when there are several."""
        found = [v for n, v in self.headers if n == name]
        return None if not found else found[0] if len(found) == 1 else b""

    async def body(self) -> bytes:
        """Return the whole body. Raises Malformed (``malformed.size``, ``malformed.slow``) or Gone."""
        told = self.header(b"content-length")
        if told is not None and (not told.isdigit() or int(told[:16]) > body.LIMIT):
            raise body.too_large()
        found = bytearray()
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    found += message.get("body", b"")
                    if len(found) > body.LIMIT:
                        raise body.too_large()
                    if not message.get("more_body"):
                        return bytes(found)
        except TimeoutError:
            raise body.malformed(f"the body took longer than {BODY_S:g} s", "slow") from None

    def watch(self, activity: asyncio.Event) -> None:
        """From now on set `left` and `activity` when the client goes away. The body must have been read.

        Without this an abort stays unseen: writing to a client that has gone raises nothing.
        """
        async def wait() -> None:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.left.set()
            activity.set()

        self._watcher = asyncio.create_task(wait())

    def unwatch(self) -> None:
        """Stop watching."""
        if self._watcher is not None:
            self._watcher.cancel()

    async def begin(self) -> None:
        """Send the head of a stream."""
        await self._start(200, _STREAM)

    async def piece(self, data: bytes, look: Callable[[], None]) -> None:
        """Send a piece of a stream.

        Args: `look` is asked while the client does not read; what it raises ends the wait. Raises Gone.
        """
        await self._patiently({"type": "http.response.body", "body": data, "more_body": True}, look)

    async def finish(self, data: bytes) -> None:
        """Send the last piece of a stream. Raises Gone."""
        self.over = True
        await self._patiently({"type": "http.response.body", "body": data}, lambda: None)

    async def _patiently(self, message: dict[str, Any], look: Callable[[], None]) -> None:
        sending = asyncio.ensure_future(self._send(message))
        waited = 0.0
        try:
            while not (await asyncio.wait({sending}, timeout=LOOK_S))[0]:
                waited += LOOK_S
                look()
                if self.left.is_set() or waited >= STALL_S:
                    raise Gone
            await sending
        finally:
            sending.cancel()

    async def reply(self, value: dict[str, Any], status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a whole answer."""
        data = answers.encode(value)
        head = {"content-type": "application/json", "content-length": str(len(data)), "cache-control": "no-store"}
        await self._start(status, {**head, **(headers or {})})
        await self.finish(data)

    async def refuse(self, refusal: Refusal) -> None:
        """Send a refusal: as a whole answer, or as the last event of a stream that has begun, without [DONE]."""
        status = status_of(refusal)
        value = answers.error(refusal, status)
        if self.over:
            return
        if self.begun:
            await self.finish(answers.event(value))
            return
        headers = {"retry-after": str(refusal.details["retry_after_s"])} if "retry_after_s" in refusal.details else {}
        if status == 401:
            headers["www-authenticate"] = "Bearer"
        if refusal.code in ("malformed.size", "malformed.slow"):
            headers["connection"] = "close"  # the rest of the body is not read
        await self.reply(value, status, headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.begun = True
        rows = [(n.encode(), v.encode()) for n, v in {**headers, **self.extra}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": rows})


def status_of(refusal: Refusal) -> int:
    """Return the HTTP status of a refusal."""
    return STATUS.get(refusal.code, refusal.http_status)
