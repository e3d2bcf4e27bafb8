"""The gateway's process: `python -I -m runners gateway`, started by the launcher through runners/gateway_line.py.

A user of its own, no root, no key of a person, no weights. It listens on 127.0.0.1 alone: without TLS there is no
other address. It learns of engines by the control socket that it inherited; when the launcher goes, that ends, and so
does the gateway.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
from collections.abc import Iterator

import uvicorn

from audit.spool import Spool
from interlock.errors import Malformed, Refusal, Unavailable, Untrusted
from killswitch.page import StopPage
from runners.folders import folders
from runners.inference.front import Patient
from runners.inference.gateway import Gateway
from runners.inherited import close_memory, open_control, read_key
from runners.shared_view import SharedView
from runners.unfinished import unfinished

ADDRESS = "127.0.0.1"
CONTROL_LIMIT, CONTROL_FDS = 64 * 1024, 4
SHUTDOWN_S = 3


class Listener(uvicorn.Server):
    """A uvicorn server that leaves signals to us."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


def bind(port: int, address: str = ADDRESS) -> socket.socket:
    """Return the listening socket.

    Raises Unavailable (``unavailable.port``) and Untrusted (``untrusted.plaintext``) for an address other than
    loopback: keys and prompts would cross a network in the clear.
    """
    if address != ADDRESS:
        raise Untrusted("the gateway has no TLS, so it serves 127.0.0.1 alone", code="plaintext",
                        next_step="put a proxy with TLS before it on this host")
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise Unavailable(f"port {port} cannot be used: {error.strerror}", code="port",
                          next_step="choose another gateway port, or end what uses it") from None
    return sock


class Control:
    """The launcher's messages, one after the other."""

    def __init__(self, control: socket.socket, gateway: Gateway) -> None:
        self._control, self._gateway = control, gateway

    async def serve(self) -> None:
        """Return when the launcher is gone."""
        self._control.setblocking(False)
        loop = asyncio.get_running_loop()
        readable = asyncio.Event()
        loop.add_reader(self._control.fileno(), readable.set)
        try:
            while True:
                await readable.wait()
                readable.clear()
                with contextlib.suppress(BlockingIOError):
                    data, fds, _, _ = socket.recv_fds(
                        self._control, CONTROL_LIMIT, CONTROL_FDS, socket.MSG_CMSG_CLOEXEC)
                    if not data:
                        return
                    reply = await self._answer(data, fds)
                    await loop.sock_sendall(self._control, json.dumps(reply).encode())
        except OSError:
            return
        finally:
            loop.remove_reader(self._control.fileno())

    async def _answer(self, data: bytes, fds: list[int]) -> dict[str, object]:
        try:
            if len(fds) > 1:
                raise Malformed("more than one socket came with a message", code="wire")
            listener = socket.socket(fileno=fds.pop()) if fds else None
            return await self._gateway.obey(json.loads(data), listener)
        except Refusal as refusal:
            return {"ok": False, "error": refusal.as_json()}
        finally:
            for fd in fds:
                os.close(fd)


def _allow_connections() -> None:
    """Take as many descriptors as the host gives: each client and each engine connection is one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def serve(state: str | None, runtime: str | None, node: str, control_fd: int, key_fd: int, port: int) -> None:
    """Serve until the launcher goes. Raises Untrusted (root, no key), NotRecorded (no spool), Unavailable."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the launcher's business
    close_memory()
    control, key = open_control(control_fd, "gateway"), read_key(key_fd)
    _allow_connections()
    found = folders(state, runtime)
    spool = Spool(found.gateway_spool, node, "gateway")
    try:
        for end in unfinished(found.gateway_spool):
            spool.record(end)
        with contextlib.closing(bind(port)) as listener:
            asyncio.run(_serve(control, key, listener, node, spool, SharedView(found),
                               StopPage(found.page, found.stop_state)))
    finally:
        spool.close()
        control.close()


async def _serve(
    control: socket.socket, key: bytes, listener: socket.socket, node: str, spool: Spool, view: SharedView,
    page: StopPage,
) -> None:
    gateway = Gateway(view, page, spool.record, node, key)
    config = uvicorn.Config(
        gateway.app, http=Patient, ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, proxy_headers=False, timeout_graceful_shutdown=SHUTDOWN_S)
    server = Listener(config)
    ending = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ending.set)
    tasks = [asyncio.create_task(c) for c in (
        server.serve(sockets=[listener]), Control(control, gateway).serve(), ending.wait())]
    summing = asyncio.create_task(gateway.sum_up())
    ready = {"ok": True, "pid": os.getpid(), "port": listener.getsockname()[1]}
    control.send(json.dumps(ready).encode())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gateway.pool.close_all()
        server.should_exit = True
        await asyncio.wait(tasks[:1], timeout=SHUTDOWN_S + 1)
        for task in (*tasks, summing):
            task.cancel()
        ended = await asyncio.gather(*tasks, summing, return_exceptions=True)
        await gateway.close()
    for fault in ended:
        if isinstance(fault, Exception):
            raise fault  # a gateway that ends by itself says why
