"""Hostile engines, local flooders, callers with tricks: what they must not get, take or hold up."""

import asyncio
import contextlib
import dataclasses
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from interlock.canon import digest_bytes
from interlock.order import ScopeKind
from runners.inference import callers, dialled, frames, front, pool
from runners.inference.exchange import Exchange
from runners.inference.limits import Allowance
from runners.inference.pool import Engine
from tests.inference.gateway_room import Room, credential, wait_for
from tests.inference.stand_in import VERSION, Script

Answer = Callable[[str], list[dict[str, Any]]]


@contextlib.contextmanager
def hostile(room: Room, model: str, answer: Answer, kind: frames.Kind = "text") -> Iterator[Engine]:
    """Serve `model` by an engine that answers each call, told its id, with any frames at all."""
    path, run = str(room.folder / "h.sock"), f"run_{model}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen(4)
        engine = Engine(run, 1, os.getuid(), room.labels(model, run), VERSION)
        room.soon(room.gateway.pool.open(engine, listener.dup()))

    def speak() -> None:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.connect(path)
            frames.send(line, frames.Hello(run, 1, VERSION, kind, 4096, model).as_json())
            while (asked := frames.receive(line)) is not None:
                for frame in answer(str(asked["id"])):
                    frames.send(line, {"id": asked["id"], **frame})

    thread = threading.Thread(target=speak, daemon=True)
    thread.start()
    try:
        wait_for(lambda: engine.ready)
        yield engine
    finally:
        room.call(room.gateway.pool.close, run, 1)
        thread.join(5)
        assert not thread.is_alive()
        os.unlink(path)


def end(tokens: int) -> dict[str, Any]:
    return {"done": {"reason": "stop", "prompt_tokens": 1, "completion_tokens": tokens}}


# --- an engine that lies ------------------------------------------------------------------------------


def test_the_words_of_an_engines_refusal_reach_neither_caller_nor_record(room: Room) -> None:
    said = {"code": "malformed.CANARY" + "x" * 500, "message": "see http://CANARY.example", "next_step": "CANARY@b.c",
            "details": {"field": "CANARY", "call": "CANARY", "retry_after_s": "CANARY"}}
    for code, status in (("malformed.context", 422), (said["code"], 502), ("malformed.size", 502), (["CANARY"], 502)):
        with hostile(room, "astra", lambda _, code=code: [{"error": {**said, "code": code}}]):  # type: ignore[misc]
            answer = room.ask("rae", model="astra")
        assert answer.status_code == status
        assert "CANARY" not in answer.text + repr(answer.headers)
        if status == 422:
            assert answer.json()["error"]["code"] == "malformed.context"  # control: what it was about is told
    wait_for(lambda: len(room.records.of("infer.answered")) == 4)
    assert "CANARY" not in repr([e.as_json() for e in room.records.events])


@pytest.mark.parametrize("number", [10**400, 1e200, -(10**400)], ids=["huge", "wide", "deep"])
@pytest.mark.parametrize("packed", [True, False])
def test_a_vector_that_is_no_vector_ends_on_record(room: Room, number: float, packed: bool) -> None:
    form: dict[str, Any] = {"model": "words", "input": "x", "encoding_format": "base64" if packed else "float"}
    with hostile(room, "words", lambda _: [{"vectors": [[0.5]], "prompt_tokens": 1}], "embedding"):
        assert room.ask("rae", "/v1/embeddings", **form).status_code == 200  # control
    with hostile(room, "words", lambda _: [{"vectors": [[number]], "prompt_tokens": 1}], "embedding"):
        answer = room.ask("rae", "/v1/embeddings", **form)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "unavailable.engine_lost")
    assert [e.facts["outcome"] for e in room.settled("infer.answered", 2)] == ["ok", "error"]


def test_a_fault_of_ours_in_an_answer_is_on_record(room: Room, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def fault(*_: object) -> bytes:
        raise OverflowError("CANARY")

    monkeypatch.setattr("runners.inference.answers.Shape.whole", fault)
    with room.engine("nova"):
        assert room.ask("rae", model="nova").json()["error"]["code"] == "unavailable.fault"
    assert len(room.settled("infer.answered")) == 1  # durable before its last byte, so it stands as answered
    monkeypatch.setattr("runners.inference.answers.Shape.piece", fault)
    with room.engine("luna"):
        assert '"code":"unavailable.fault"' in room.ask("rae", stream=True).text
    found = room.settled("infer.answered", 2)[1]
    assert (found.facts["outcome"], found.facts["code"]) == ("truncated", "unavailable.fault")
    assert "CANARY" not in capfd.readouterr().err


@pytest.mark.parametrize(("told", "status"), [(5, 200), (6, 200), (4, 502), (0, 502)])
def test_an_engine_cannot_have_said_more_than_it_counts(room: Room, told: int, status: int) -> None:
    with hostile(room, "luna", lambda _: [{"delta": "hello", "tokens": 5}, end(told)]):
        assert room.ask("rae").status_code == status
    found = room.settled("infer.answered")[0].facts
    assert found["tokens_out"] == max(told, 5)


# --- somebody on this host ----------------------------------------------------------------------------


def test_all_of_loopback_shares_the_anonymous_limit(room: Room) -> None:
    def ask(place: int, key: str = "") -> int:
        way = httpx.HTTPTransport(local_address=f"127.0.0.{place}", verify=False)
        headers = {"authorization": f"Bearer {credential(key)}"} if key else {}
        with httpx.Client(transport=way, base_url=f"http://127.0.0.1:{room.port}", headers=headers) as client:
            return client.get("/v1/models").status_code

    begun = time.monotonic()
    admitted = [ask(place) for place in range(2, 14)].count(200)
    assert admitted <= 3 + 3 * (time.monotonic() - begun)
    assert ask(99, "rae") == 200  # control: who shows a key is counted by it


# --- a caller with tricks -----------------------------------------------------------------------------


def stalled(room: Room) -> socket.socket:
    """Open a stream and read nothing of it."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", room.port))
    body = b'{"model":"luna","prompt":"x","stream":true,"max_tokens":4096}'
    client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                   b"Authorization: Bearer %b\r\nContent-Length: %d\r\n\r\n%b"
                   % (credential("rae").encode(), len(body), body))
    return client


def test_a_stop_ends_the_making_of_tokens_although_the_client_reads_nothing(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, finish = threading.Event(), Exchange.finish

    async def unread(self: Exchange, data: bytes) -> None:  # a full socket: the last words of the stop stay behind
        while not gone.is_set():
            await asyncio.sleep(0.01)
        await finish(self, data)

    monkeypatch.setattr(Exchange, "finish", unread)
    script = Script(text="x" * 4096, pace_s=0.001)
    with room.engine(script=script), contextlib.closing(stalled(room)), contextlib.ExitStack() as stack:
        stack.callback(gone.set)
        wait_for(lambda: script.made > 20)  # control: it is under way
        room.page.stop(ScopeKind.SUBJECT, "rae")
        wait_for(lambda: script.aborted_at, 2)
        at = script.made
        time.sleep(0.1)
        assert script.made <= at + 1


def test_line_ends_of_other_readers_do_not_break_an_event(room: Room) -> None:
    text = "a\u2028b\u2029c\x85d\r\ne"
    with room.engine(script=Script(text=text)), room.client("rae") as client:
        answer = client.post("/v1/completions", json={"model": "luna", "prompt": "x", "stream": True})
        assert answer.text.splitlines() == answer.text.split("\n")[:-1]
        pieces = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
        found = "".join(httpx.Response(200, content=p).json()["choices"][0]["text"] for p in pieces)
    assert found == text


# --- an engine that floods ----------------------------------------------------------------------------


def lines_of(room: Room, model: str = "luna") -> tuple[str, Engine]:
    """Open an engine's socket that the test dials by itself."""
    path, run = str(room.folder / "f.sock"), f"run_{model}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(4)
    engine = Engine(run, 1, os.getuid(), room.labels(model, run), VERSION)
    room.soon(room.gateway.pool.open(engine, listener))
    return path, engine


def test_an_engine_that_nobody_asked_cannot_make_the_gateway_read_much(room: Room) -> None:
    path, engine = lines_of(room)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        line.sendall((4097).to_bytes(4, "big"))
        assert line.recv(1) == b""  # by the length alone
    wait_for(lambda: engine.error == "malformed.frame")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        frames.send(line, frames.Hello("run_luna", 1, VERSION, "text", 4096, "luna").as_json())
        wait_for(lambda: engine.ready)  # control
        line.sendall((4097).to_bytes(4, "big"))
        assert line.recv(1) == b""


def test_an_engine_that_dials_without_end_waits(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialled, "BURST", 4)
    path, engine = lines_of(room)
    begun = time.monotonic()
    for _ in range(14):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(5)
            line.connect(path)
            line.sendall((4097).to_bytes(4, "big"))
            assert line.recv(1) == b""
    assert time.monotonic() - begun > 9 / dialled.PER_S  # the four at once, the others at their pace
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
        line.connect(path)
        frames.send(line, frames.Hello("run_luna", 1, VERSION, "text", 4096, "luna").as_json())
        wait_for(lambda: engine.ready)  # control: it is not locked out


def test_refuses_a_frame_of_very_many_objects_and_takes_text_full_of_brackets(room: Room) -> None:
    text = "[{" * 500
    with hostile(room, "luna", lambda _: [{"delta": text, "tokens": 9}, end(9)]):
        assert room.ask("rae", max_tokens=9).json()["choices"][0]["text"] == text  # control
    with hostile(room, "luna", lambda _: [{"delta": "x", "tokens": 1, "more": [[]] * 400}, end(1)]):
        assert room.ask("rae").status_code == 502


@pytest.mark.parametrize(("frames_sent", "whole"), [(5, True), (6, False), (500, False)])
def test_frames_without_tokens_are_not_read_for_ever(room: Room, frames_sent: int, whole: bool) -> None:
    def answer(_: str) -> list[dict[str, Any]]:
        return [*[{"delta": "", "tokens": 0}] * frames_sent, end(0)]

    with hostile(room, "luna", answer):
        assert room.ask("rae", max_tokens=4).json()["choices"][0]["finish_reason"] == ("stop" if whole else "length")
    wait_for(lambda: len(room.records.of("incident.raised")) == (not whole))


def test_a_connection_that_comes_after_the_end_of_an_attempt_finds_nobody(room: Room) -> None:
    _, engine = lines_of(room)

    async def both() -> None:
        line = pool.Line(engine, room.gateway.pool)
        room.gateway.pool.close(engine.run, 1)
        mine, theirs = socket.socketpair()
        with theirs:
            mine.setblocking(False)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: line, mine)
            assert line.lost

    room.soon(both())
    assert not engine.lines


# --- somebody who holds every connection --------------------------------------------------------------


def test_who_holds_every_connection_keeps_nobody_out(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "CONNECTIONS", 8)
    script = Script(text="x" * 400, pace_s=0.01)
    with room.engine(script=script), contextlib.closing(stalled(room)) as under_way, contextlib.ExitStack() as held:
        wait_for(lambda: script.made)
        for _ in range(20):
            held.enter_context(socket.create_connection(("127.0.0.1", room.port)))
        assert room.ask("rae", max_tokens=2).status_code == 200
        assert not script.aborted_at  # control: the one with a call under way stays, though it is the oldest
        under_way.close()
        wait_for(lambda: script.aborted_at)


def test_the_restricted_profile_does_not_go_on_with_a_link_of_the_prompt(room: Room) -> None:
    with room.engine("astra", Script(text="evil.example/a b")):
        for who, shown in (("pat", "evil.example/a b"), ("rae", "[link withheld] b")):  # control: the full profile
            for prompt in ("see https://", "www."):
                answer = room.ask(who, model="astra", prompt=prompt, max_tokens=32)
                assert answer.json()["choices"][0]["text"] == shown
        assert room.ask("rae", model="astra", prompt="see", max_tokens=32).json()["choices"][0]["text"] == (
            "evil.example/a b")


# --- a person with many keys --------------------------------------------------------------------------


def test_all_keys_of_a_person_have_one_limit_together(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    assert room.view.now is not None
    rae, more = room.view.now.keys["key_rae0000000"], credential("more")
    second = dataclasses.replace(rae, id="key_more000000", hash=digest_bytes(more.encode()))
    room.view.now = dataclasses.replace(room.view.now, keys={**room.view.now.keys, second.id: second})
    monkeypatch.setattr(callers, "PERSON", Allowance(per_s=1, burst=3, together=3))
    with room.engine():
        found = [room.ask(name).status_code for name in ("rae", "more", "rae", "more", "rae")]
        assert found == [200, 200, 200, 429, 429]
        assert room.ask("pat").status_code == 200  # control: another person


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(("begin", "most"), [
    (b"GET /healthz?", front.HEAD_BYTES), (b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: ", front.HEAD_BYTES),
    (_HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: ", front.MESSAGE_BYTES),
], ids=["path", "header", "trailer"])
def test_what_belongs_to_no_body_is_not_kept_for_as_long_as_it_comes(room: Room, begin: bytes, most: int) -> None:
    sent = 0
    with socket.create_connection(("127.0.0.1", room.port)) as line, contextlib.suppress(OSError):
        line.sendall(begin)
        while sent < 64 << 20:
            line.sendall(b"a" * (64 << 10))
            sent += 64 << 10
    assert sent < most + (16 << 20)  # what lies in the kernel's buffers counts too
    with room.client() as client:  # control: much in a head, and a whole body, is fine; a connection is used again
        for _ in range(3):
            assert client.get("/healthz", headers={"x": "a" * 50_000}).status_code == 200
            assert client.post("/healthz", content=b"x" * (1 << 20)).status_code == 405
