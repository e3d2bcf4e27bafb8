"""What stands before every route: size limit of bodies, and headers that a browser must see (console.md §3)."""

import json
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from interlock.errors import Malformed

# referrer-policy: under `no-referrer` a browser sends `Origin: null` with our own forms, and none would pass.
HEADERS = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"), (b"x-frame-options", b"DENY"), (b"referrer-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"), (b"cross-origin-resource-policy", b"same-origin"),
    (b"permissions-policy", b"camera=(), microphone=(), geolocation=()"),
)


class PageHeaders:
    """Adds the headers to every answer; one that a route set itself stays, `no-store` is the default."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                held = {name.lower() for name, _ in message["headers"]}
                extra = [*HEADERS, (b"cache-control", b"no-store")]
                message["headers"] = [*message["headers"], *(h for h in extra if h[0] not in held)]
            await send(message)

        await self._app(scope, receive, with_headers if scope["type"] == "http" else send)


class BodyLimit:
    """Refuses a body over `limit` bytes: by its announced length at once, else when it has grown too large."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if _announced(scope) > self._limit:
            await _too_large(send, self._limit)
            return
        counted = 0

        async def counting() -> Message:
            nonlocal counted
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > self._limit:
                raise Malformed(f"the body is larger than {self._limit} bytes", code="size")
            return message

        await self._app(scope, counting, send)


def _announced(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 1 << 62
    return 0


async def _too_large(send: Send, limit: int) -> None:
    refusal = Malformed(f"the body is larger than {limit} bytes", code="size")
    body = json.dumps({"error": refusal.as_json()}).encode()
    headers: list[tuple[bytes, Any]] = [(b"content-type", b"application/json"), (b"connection", b"close"),
                                        (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 413, "headers": headers})
    await send({"type": "http.response.body", "body": body})
