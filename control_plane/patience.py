"""A connection that sends no whole request is closed: open files are few, and a stop needs one."""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol


class Patient(HttpToolsProtocol):
    """Waits `HEAD_S` seconds for the head of a request and `BODY_S` for the rest of it."""

    HEAD_S, BODY_S = 15.0, 300.0
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait(self.HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing further."""
        self._wait(0)
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        """Begin to wait for the head."""
        super().on_message_begin()
        self._wait(self.HEAD_S)

    def on_headers_complete(self) -> None:
        """Begin to wait for the body."""
        super().on_headers_complete()
        self._wait(self.BODY_S)

    def on_message_complete(self) -> None:
        """The request is whole; how long its answer takes is the route's matter."""
        super().on_message_complete()
        self._wait(0)

    def _wait(self, seconds: float) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None
        if seconds:
            self._late = self.loop.call_later(seconds, self.transport.abort)


def open_files() -> None:
    """Let this process open as many files as it is allowed to."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
