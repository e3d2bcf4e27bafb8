"""A connection that sends a request drop by drop does not stay; a whole one is answered."""

import asyncio
import socket

import pytest
import uvicorn

from control_plane.patience import Patient


class Hasty(Patient):
    HEAD_S, BODY_S = 0.3, 0.3


async def _app(_scope: object, receive: object, send: object) -> None:
    await receive()  # type: ignore[operator]
    await asyncio.sleep(0.6)  # an answer may take longer than a request
    await send({"type": "http.response.start", "status": 200, "headers": []})  # type: ignore[operator]
    await send({"type": "http.response.body", "body": b"whole"})  # type: ignore[operator]


async def _told(sent: bytes) -> bytes:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(_app, http=Hasty, lifespan="off", log_config=None))
        serving = asyncio.create_task(server.serve(sockets=[bound]))
        while not server.started:
            await asyncio.sleep(0.01)
        reader, writer = await asyncio.open_connection(*bound.getsockname())
        writer.write(sent)
        try:
            return await asyncio.wait_for(reader.read(400), 3)
        except ConnectionError:
            return b""
        finally:
            writer.close()
            server.should_exit = True
            await serving


@pytest.mark.parametrize("sent", [
    b"", b"GET / HTTP/1.1\r\nHost: x\r\n", b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nab"])
def test_refuses_when_a_request_is_never_whole(sent: bytes) -> None:
    assert asyncio.run(_told(sent)) == b""


def test_a_whole_request_is_answered() -> None:
    assert b"whole" in asyncio.run(_told(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"))
