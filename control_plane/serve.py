"""Both listeners in one process, under our own event loop: people on localhost, nodes by mutual TLS.

Never through uvicorn's command line: it puts the current directory first on sys.path. One process a state (flock);
ports are bound before anything else is promised, so a port in use is one clear refusal.
"""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from control_plane import app as joint
from control_plane.certificates import ready_server
from control_plane.init import refuse_unfinished
from control_plane.node_link import listener
from control_plane.parts import Parts
from control_plane.patience import Patient, open_files
from control_plane.settings import Places, Settings
from control_plane.ticker import Ticker
from interlock.errors import Conflict, Unavailable
from interlock.event import Event, EventType

SHUTDOWN_S = 3


@contextlib.contextmanager
def alone(places: Places) -> Iterator[None]:
    """Hold the state's lock; raises Conflict (``conflict.running``) when another process holds it."""
    fd = os.open(places.control / "serve.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict("a control plane serves this state already", code="running",
                       next_step="see its pid file, or interlock down") from None
    try:
        yield
    finally:
        os.close(fd)


def bind(port: int) -> list[socket.socket]:
    """Return listening sockets on the loopback addresses. Raises Unavailable (``unavailable.port``)."""
    made: list[socket.socket] = []
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
        try:
            made.append(_bound(family, address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno != errno.EADDRINUSE:
                continue  # a host without IPv6
            for sock in made:
                sock.close()
            raise Unavailable(f"port {port} cannot be used: {error.strerror}", code="port",
                              next_step="choose another port in site.json, or end what uses it",
                              details={"port": port}) from None
    return made


def _bound(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address, port))
        sock.listen(256)
    except OSError:
        sock.close()
        raise
    return sock


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def run(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises the refusal that keeps it from starting."""
    refuse_unfinished(settings.places)
    os.umask(0o077)
    open_files()
    with alone(settings.places):
        ready_server(settings.places.keys)
        people, nodes = bind(settings.people_port), bind(settings.nodes_port)
        parts = joint.build(settings)
        try:
            asyncio.run(_serve(parts, people, nodes))
        finally:
            parts.desk.close()
            parts.engine.dispose()


async def _serve(parts: Parts, people: list[socket.socket], nodes: list[socket.socket]) -> None:
    ticker = Ticker.of(parts)
    ticker.faults.update(await asyncio.to_thread(joint.start, parts))
    config = uvicorn.Config(
        joint.people_app(parts, ticker), http=Patient, ws="none", lifespan="off", log_config=None, access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=SHUTDOWN_S)
    link = listener(joint.nodes_app(parts), parts.settings.places.keys)
    link.timeout_graceful_shutdown = SHUTDOWN_S
    servers = [Listener(config), Listener(link)]
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _end, servers)
    tasks = [asyncio.create_task(s.serve(sockets=socks)) for s, socks in zip(servers, (people, nodes), strict=True)]
    ticking = asyncio.create_task(ticker.run())
    await _started(servers, tasks)
    parts.desk.note(Event(EventType.STARTED, "control", facts={"pid": os.getpid(), "site": parts.settings.site}))
    print(json.dumps({"ready": "control_plane", "people": parts.settings.people_url,  # noqa: T201
                      "nodes": parts.settings.nodes_url, "pid": os.getpid()}), flush=True)
    try:
        await asyncio.gather(*tasks)
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking


def _end(servers: list[Listener]) -> None:
    for server in servers:
        server.should_exit = True


async def _started(servers: list[Listener], tasks: list[asyncio.Task[None]]) -> None:
    while not all(s.started for s in servers):
        for task in tasks:
            if task.done():
                task.result()
                raise Unavailable("a listener ended at once", code="listener")
        await asyncio.sleep(0.02)


def say(error: dict[str, object]) -> None:
    """Print a refusal at start on stderr as one JSON object."""
    print(json.dumps({"error": error}), file=sys.stderr, flush=True)  # noqa: T201
