"""Engines that are connected, and the connections on which they are asked. One event loop; nothing here blocks.

An engine dials: each connection that was accepted at its socket, comes from the run's own uid and said hello with the
run, the attempt and the version that the launch order names is one call at a time. A connection that says anything
else, or anything at all while nobody asked, is hung up on. An engine is ready while it has such a connection.
"""

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from interlock.errors import Conflict, Malformed, Refusal, Unavailable, Untrusted
from interlock.order import Labels
from policy.snapshot import ModelRow
from runners.inference import body, frames
from runners.inference.dialled import Dialled

HELLO_S = 10.0
QUEUE_S = 5.0
HELLO_LIMIT = 4096
NESTED = frames.INPUTS + 64  # a row for each input is the most that an answer has
BACKLOG = 64  # frames that wait for a slow client before its engine has to wait too


@dataclass(eq=False)
class Engine:
    """One attempt of a run that serves `version`. `error` is the code of the last connection that was refused."""

    run: str
    attempt: int
    uid: int
    labels: Labels
    version: str
    error: str = ""
    hello: frames.Hello | None = None
    lines: "set[Line]" = field(default_factory=set)
    server: Dialled | None = None

    @property
    def ready(self) -> bool:
        """Return whether it can be asked."""
        return any(line.ready for line in self.lines)

    def serves(self, row: ModelRow) -> bool:
        """Return whether it is an engine of exactly this model and version."""
        return (self.labels.model, self.labels.tenant, self.version) == (row.name, row.tenant, row.version)

    def as_json(self) -> dict[str, Any]:
        """Return what the launcher asks for."""
        return {"run": self.run, "attempt": self.attempt, "ready": self.ready, "error": self.error}


class Line(asyncio.Protocol):
    """One accepted connection. `activity` is set when something happened: a frame came, or it is `lost`."""

    def __init__(self, engine: Engine, pool: "Pool") -> None:
        self.engine, self._pool = engine, pool
        self.ready = self.busy = self.asked = self.lost = False
        self.activity = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bytes = bytearray()
        self._frames: deque[dict[str, Any]] = deque()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Judge who dialled, by the host's own word."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        peer = transport.get_extra_info("socket")
        _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != self.engine.uid:
            self._refuse(Untrusted("this socket belongs to another run", code="peer"), peer_uid=uid)
        elif self.engine.server is None or len(self.engine.lines) >= frames.CONNECTIONS:
            self.drop()
        else:
            self.engine.lines.add(self)
            self._timer = asyncio.get_running_loop().call_later(HELLO_S, self.drop)

    def data_received(self, data: bytes) -> None:
        """Take frames apart; the first is the hello."""
        self._bytes += data
        try:
            while not self.lost and (frame := self._frame()) is not None:
                self._take(frame)
        except Refusal as refusal:
            self._refuse(refusal)

    def _frame(self) -> dict[str, Any] | None:
        if len(self._bytes) < frames.HEADER:
            return None
        size = frames.length(bytes(self._bytes[: frames.HEADER]))
        if size > (frames.LIMIT if self.asked else HELLO_LIMIT):
            raise Malformed("an engine that nobody asked says too much", code="frame")
        end = frames.HEADER + size
        if len(self._bytes) < end:
            return None
        found = bytes(self._bytes[frames.HEADER:end])
        del self._bytes[:end]
        if body.opened(found, NESTED) > NESTED:
            raise Malformed("a frame of an engine holds too many objects", code="frame")
        return frames.decode(found)

    def _take(self, frame: dict[str, Any]) -> None:
        if not self.ready:
            self._greet(frames.Hello.from_json(frame))
            return
        if not self.asked:
            raise Untrusted("an engine spoke without being asked", code="engine")
        self._frames.append(frame)
        if len(self._frames) == BACKLOG and self._transport is not None:
            self._transport.pause_reading()
        self.activity.set()

    def _greet(self, hello: frames.Hello) -> None:
        engine = self.engine
        if (hello.run, hello.attempt) != (engine.run, engine.attempt):
            raise Untrusted("an engine says that it is another run", code="engine")
        if hello.version != engine.version or hello.name != engine.labels.model:
            raise Untrusted("an engine serves another version than its plan names", code="version")
        if self._timer is not None:
            self._timer.cancel()
        engine.hello, engine.error, self.ready = hello, "", True
        self._pool.moved()

    def _refuse(self, refusal: Refusal, **facts: int) -> None:
        self.engine.error = refusal.code
        self._pool.incident(self.engine, {"code": refusal.code, **facts})
        self.drop()

    def ask(self, frame: bytes) -> None:
        """Write the frame of a call. Only runners/inference/dispatch.py does, behind a permit."""
        self.asked = True
        if self._transport is not None:
            self._transport.write(frame)

    def next(self) -> dict[str, Any] | None:
        """Return the next frame of the answer, or None when none has come yet."""
        if not self._frames:
            return None
        if len(self._frames) == BACKLOG and self._transport is not None and not self.lost:
            self._transport.resume_reading()
        return self._frames.popleft()

    def drop(self) -> None:
        """Hang up at once. The engine takes that as: make nothing further for this call."""
        if self._transport is not None:
            self._transport.abort()
        self._end()

    def overrun(self) -> None:
        """Hang up on an engine that answered beyond the terms of a call: it was told them, so this is an incident."""
        self._refuse(Untrusted("an engine answered beyond the terms of the call", code="terms"))

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Note that nothing more comes."""
        self._end()

    def _end(self) -> None:
        self.lost, self.ready = True, False
        if self._timer is not None:
            self._timer.cancel()
        self.engine.lines.discard(self)
        self.activity.set()
        self._pool.moved()


class Pool:
    """All engines of this node.

    Args: `incident` is told of what must not happen: the engine and facts. It must not block.
    """

    def __init__(self, incident: Callable[[Engine, dict[str, Any]], None]) -> None:
        self.incident = incident
        self._engines: dict[tuple[str, int], Engine] = {}
        self._moved = asyncio.Event()

    def moved(self) -> None:
        """Wake whoever waits for a connection."""
        self._moved.set()
        self._moved = asyncio.Event()

    async def open(self, engine: Engine, listener: socket.socket) -> None:
        """Listen for one attempt; takes `listener` over. Raises Conflict (``conflict.engine``)."""
        key = engine.run, engine.attempt
        if key in self._engines:
            listener.close()
            raise Conflict("this attempt is open already", code="engine")
        self._engines[key] = engine
        engine.server = Dialled(listener, lambda: Line(engine, self))

    def close(self, run: str, attempt: int) -> None:
        """Hang up on an attempt and listen for it no more; one that is not open is no error."""
        engine = self._engines.pop((run, attempt), None)
        if engine is None:
            return
        if engine.server is not None:
            engine.server.close()
            engine.server = None  # one that is being accepted right now finds nobody
        for line in list(engine.lines):
            line.drop()

    def close_all(self) -> None:
        """Hang up on everybody."""
        for run, attempt in list(self._engines):
            self.close(run, attempt)

    def engines(self) -> list[dict[str, Any]]:
        """Return every open attempt as the launcher asks for it."""
        return [e.as_json() for e in self._engines.values()]

    def ready(self, row: ModelRow) -> list[Engine]:
        """Return the engines that can answer for exactly this version, the idlest first."""
        found = [e for e in self._engines.values() if e.serves(row) and e.ready]
        return sorted(found, key=lambda e: sum(x.busy for x in e.lines))

    async def take(self, row: ModelRow, wait_s: float = QUEUE_S) -> Line:
        """Return an idle connection to an engine of `row`, reserved for the caller until `give_back`.

        Waits for one at most `wait_s`. Raises Unavailable (``unavailable.engine`` for none at all,
        ``unavailable.busy``). Never an engine of another model or version.
        """
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    engines = self.ready(row)
                    if not engines:
                        raise Unavailable("no engine serves this model now", code="engine",
                                          next_step="interlock model serve NAME, or try again when it is ready")
                    for line in _idle(engines):
                        line.busy = True
                        return line
                    await self._moved.wait()
        except TimeoutError:
            raise Unavailable("every engine of this model is busy", code="busy",
                              next_step="try again in a few seconds") from None

    def give_back(self, line: Line, *, whole: bool) -> None:
        """Let go of a connection. `whole`: its answer was read to the end; otherwise it is hung up on."""
        if line.asked and (not whole or line.next() is not None):
            line.drop()
        line.busy = line.asked = False
        self.moved()


def _idle(engines: list[Engine]) -> Iterator[Line]:
    return (line for engine in engines for line in engine.lines if line.ready and not line.busy)
