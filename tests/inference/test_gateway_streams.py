"""Answers while they are made: clients that leave, stops, engines that die, terms on a stream, slow readers."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from interlock.errors import Halted, Malformed
from interlock.order import ScopeKind
from runners.inference import exchange, frames, listening
from runners.inference.pool import Engine
from tests.inference.gateway_room import Room, credential, wait_for
from tests.inference.stand_in import VERSION, Script

ABORT_S = 0.25


@contextlib.contextmanager
def raw(room: Room, who: str = "rae", **body: Any) -> Iterator[socket.socket]:
    """A call whose connection is in our hand."""
    data = json.dumps({"model": "luna", "prompt": "once", "max_tokens": 4000, **body}).encode()
    head = (f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nauthorization: Bearer {credential(who)}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n")
    with socket.create_connection(("127.0.0.1", room.port), timeout=5) as line:
        line.sendall(head.encode() + data)
        yield line


def events(answer: httpx.Response) -> Iterator[dict[str, Any] | str]:
    for line in answer.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def said(event: Any) -> str:
    return "".join(c.get("text") or c.get("delta", {}).get("content") or "" for c in event["choices"])


@contextlib.contextmanager
def streaming(room: Room, who: str = "rae", **body: Any) -> Iterator[tuple[httpx.Response, Iterator[Any]]]:
    with room.client(who) as client, client.stream("POST", "/v1/completions", json={
            "model": "luna", "prompt": "once", "max_tokens": 4000, "stream": True, **body}) as answer:
        yield answer, events(answer)


# --- the client leaves --------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before the first token", "in mid-stream", "not streamed"])
def test_the_engine_hears_of_an_abort_at_once(room: Room, when: str) -> None:
    script = Script(text="x" * 3_000, pace_s=0.005, think_s=10 if when.startswith("before") else 0)
    with room.engine(script=script):
        with raw(room, stream=when != "not streamed") as line:
            wait_for(lambda: script.asked)
            if when == "in mid-stream":
                assert b"data:" in line.recv(4096) + line.recv(4096)
            elif when == "not streamed":
                wait_for(lambda: script.made > 5)
        took = wait_for(lambda: script.aborted_at)
        assert took < ABORT_S
        made = script.made
        time.sleep(0.05)
        assert script.made <= made + 1
        found = room.settled("infer.answered")[0].facts
        assert (found["outcome"], found["estimated"]) == ("aborted", True)
        wait_for(lambda: room.gateway.calls.slots.held == 0)
        if not when.startswith("before"):
            assert found["tokens_out"] >= 1
            assert found["output_bytes"] == found["tokens_out"]
        script.think_s, script.text = 0, "hello"
        assert room.ask("rae").json()["choices"][0]["text"] == "hello"  # control: the engine dialled again




def test_a_call_that_pipelines_is_hung_up_on(room: Room) -> None:
    """A request behind the one that is answered would hide that the client left."""
    with room.engine(script=Script(text="x" * 1_000, pace_s=0.01)) as script, raw(room, stream=True) as line:
        wait_for(lambda: script.asked)
        line.sendall(b"GET /healthz HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        wait_for(lambda: script.aborted_at, 2)
    assert script.made < 1_000  # it was cut off, not finished


# --- stops --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "name"), [
    (ScopeKind.MODEL, "luna"), (ScopeKind.MODEL, "sol"), (ScopeKind.RUN, "run_luna"), (ScopeKind.SUBJECT, "rae"),
    (ScopeKind.TENANT, "lab"), (ScopeKind.EVERYTHING, ""),
])
def test_a_stop_cuts_an_open_stream_within_one_piece(room: Room, kind: ScopeKind, name: str) -> None:
    with room.engine(script=Script(text="x" * 3_000, pace_s=0.02)) as script:
        with streaming(room) as (_, found):
            next(found)
            room.page.stop(kind, name)
            made, begun = script.made, time.monotonic()
            last = list(found)[-1]
            assert time.monotonic() - begun < 0.5
            assert last["error"]["code"] == "stopped"
            assert script.made <= made + 3
        wait_for(lambda: script.aborted_at)
        facts = room.settled("infer.answered")[0].facts
        assert (facts["outcome"], facts["code"]) == ("stopped", "stopped")


def test_a_stop_of_something_else_cuts_nothing(room: Room) -> None:
    with room.engine(script=Script(text="hello there", pace_s=0.01)), streaming(room) as (_, found):
        next(found)
        for kind, name in ((ScopeKind.MODEL, "nova"), (ScopeKind.RUN, "run_nova"), (ScopeKind.SUBJECT, "pat"),
                           (ScopeKind.TENANT, "elsewhere")):
            room.page.stop(kind, name)
            next(found)
        assert list(found)[-1] == "[DONE]"


def test_a_stop_cuts_a_silent_call_within_half_a_second(room: Room) -> None:
    with room.engine(script=Script(think_s=20)) as script:
        threading.Timer(0.1, room.page.stop, (ScopeKind.MODEL, "luna")).start()
        begun = time.monotonic()
        answer = room.ask("rae")
        assert time.monotonic() - begun < 0.6
        assert (answer.status_code, answer.json()["error"]["code"]) == (423, "stopped")
        wait_for(lambda: script.aborted_at)
        assert room.settled("infer.answered")[0].facts["outcome"] == "stopped"


@pytest.mark.parametrize("name", ["idle", "sol"])
def test_a_stopped_model_says_so_although_its_engine_is_gone_already(room: Room, name: str) -> None:
    assert (answer := room.ask("rae", model="idle")).status_code == 503, answer.text
    room.page.stop(ScopeKind.MODEL, name)
    answer = room.ask("rae", model="idle")
    assert (answer.status_code, answer.json()["error"]["code"]) == (423, "stopped")
    assert [e.facts["decision"]["code"] for e in room.records.of("gate.decided")] == ["stopped"]


# --- engines that die ---------------------------------------------------------------------------------


@contextlib.contextmanager
def killable(room: Room, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """An engine of luna that is a process of its own."""
    path = str(room.folder / "k.sock")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(32)
    engine = Engine("run_luna", 1, os.getuid(), room.labels("luna", "run_luna"), VERSION)
    room.soon(room.gateway.pool.open(engine, listener))
    argv = [sys.executable, "-m", "tests.inference.stand_in", path, "--run", "run_luna", *words]
    process = subprocess.Popen(argv, cwd=Path(__file__).parents[2])
    try:
        wait_for(lambda: engine.ready)
        yield process
    finally:
        process.kill()
        process.wait()


def test_an_engine_that_dies_before_and_after_the_first_byte(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "DEATH_S", 0.1)
    with killable(room, "--pace", "0.02", "--text", "x" * 400) as process:
        assert room.ask("rae", max_tokens=2).json()["choices"][0]["text"] == "xx"  # control
        with streaming(room) as (answer, found):
            next(found)
            process.kill()
            rest = list(found)
        assert answer.status_code == 200
        assert rest[-1]["error"]["code"] == "unavailable.engine_lost"
        assert "[DONE]" not in rest
        assert [e.facts["outcome"] for e in room.settled("infer.answered", 2)] == ["ok", "truncated"]
        assert room.ask("rae").json()["error"]["code"] == "unavailable.engine"


def test_an_engine_that_dies_while_it_thinks_is_a_502(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "DEATH_S", 0.1)
    with killable(room, "--think", "20") as process:
        threading.Timer(0.2, process.kill).start()
        answer = room.ask("rae", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "unavailable.engine_lost")
        assert room.settled("infer.answered")[0].facts["outcome"] == "error"


def test_an_engine_that_died_of_a_stop_is_told_as_a_stop(room: Room) -> None:
    """The kill reaches the engine before the stop page says so."""
    with killable(room, "--pace", "0.02", "--text", "x" * 400) as process, streaming(room) as (_, found):
        next(found)
        process.kill()
        threading.Timer(0.3, room.page.stop, (ScopeKind.MODEL, "luna")).start()
        assert list(found)[-1]["error"]["code"] == "stopped"
    assert room.settled("infer.answered")[0].facts["outcome"] == "stopped"


def test_a_closed_engine_ends_its_calls_and_frees_their_slots(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "DEATH_S", 0.1)
    with room.engine(script=Script(text="x" * 400, pace_s=0.02)), streaming(room) as (_, found):
        next(found)
        assert room.gateway.calls.slots.held == 1
        room.call(room.gateway.pool.close, "run_luna", 1)
        assert list(found)[-1]["error"]["code"] == "unavailable.engine_lost"
        wait_for(lambda: room.gateway.calls.slots.held == 0)


def test_an_engine_that_says_nothing_is_given_up(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "SILENT_S", 0.2)
    with room.engine(script=Script(think_s=20)) as script:
        answer = room.ask("rae")
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "unavailable.engine_silent")
        wait_for(lambda: script.aborted_at)


def test_what_an_engine_refuses_of_a_call_is_passed_on_and_its_connection_lives(room: Room) -> None:
    refusal = Malformed("the prompt leaves no room for an answer", code="context", next_step="shorten it")
    with room.engine(script=Script(refusal=refusal), connections=1) as script:
        answer = room.ask("rae")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "malformed.context")
        script.refusal = None
        assert room.ask("rae").status_code == 200


class _Garbler:
    """An engine that says hello and then answers each call with the given frames."""

    def __init__(self, room: Room, *answer: dict[str, Any]) -> None:
        self._room, self._answer = room, answer

    def __enter__(self) -> "_Garbler":
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        path = str(self._room.folder / "g.sock")
        listener.bind(path)
        listener.listen()
        engine = Engine("run_luna", 1, os.getuid(), self._room.labels("luna", "run_luna"), VERSION)
        self._room.soon(self._room.gateway.pool.open(engine, listener))
        self._line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._line.connect(path)
        hello = frames.Hello("run_luna", 1, VERSION, "text", 99, "luna")
        frames.send(self._line, hello.as_json())
        wait_for(lambda: engine.ready)
        self._thread = threading.Thread(target=self._speak, daemon=True)
        self._thread.start()
        return self

    def _speak(self) -> None:
        asked = frames.receive(self._line)
        for frame in self._answer:
            frames.send(self._line, {"id": asked["id"], **frame})
        with contextlib.suppress(OSError):
            while self._line.recv(99):
                pass

    def __exit__(self, *_: object) -> None:
        self._room.call(self._room.gateway.pool.close, "run_luna", 1)
        self._thread.join(5)
        self._line.close()
        (self._room.folder / "g.sock").unlink()


_END = {"done": {"reason": "stop", "prompt_tokens": 1, "completion_tokens": 1}}


@pytest.mark.parametrize(("answer", "status"), [
    (({"delta": "x", "tokens": 1}, _END), 200), (({"id": "other", "delta": "x", "tokens": 1},), 502),
    (({"delta": 5, "tokens": 1},), 502), (({"delta": "x", "tokens": -1},), 502), (({"done": {"reason": "fun"}},), 502),
    (({"done": {**_END["done"], "reason": "aborted"}},), 502), (({"vectors": [[1.0]], "prompt_tokens": 1},), 502),
    (({"done": {**_END["done"], "completion_tokens": 5_000}},), 502), (({"error": {"code": "denied.x"}},), 502),
])
def test_an_answer_that_is_none_is_not_passed_on(room: Room, answer: tuple[Any, ...], status: int) -> None:
    with _Garbler(room, *answer):
        found = room.ask("rae")
        assert found.status_code == status
        assert status == 200 or found.json()["error"]["code"] == "unavailable.engine_lost"


# --- streams as clients read them ---------------------------------------------------------------------


def test_a_stream_is_not_buffered_and_says_so(room: Room) -> None:
    with room.engine(script=Script(text="x" * 8, pace_s=0.05)), streaming(room) as (answer, found):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.headers["cache-control"] == "no-cache, no-transform"
        at = []
        for event in found:
            if event != "[DONE]" and said(event):
                at.append(time.monotonic())
        gaps = sorted(b - a for a, b in itertools.pairwise(at))
        assert len(at) == 8
        assert 0.03 < gaps[len(gaps) // 2] < 0.09


def test_the_filter_holds_on_a_stream_too(room: Room) -> None:
    text = "see http://a.example now"
    with room.engine("astra", Script(text=text, pace_s=0.001)):
        for who, shown in (("rae", "see [link withheld] now"), ("pat", text)):
            with streaming(room, who, model="astra") as (answer, found):
                assert "".join(said(e) for e in found if e != "[DONE]") == shown
                assert answer.headers["x-interlock-profile"] == ("restricted" if who == "rae" else "full")


def test_eight_calls_at_once_share_an_engine_of_four_connections(room: Room) -> None:
    with room.engine(script=Script(text="hello", pace_s=0.01), connections=4):
        answers: list[httpx.Response] = []
        threads = [threading.Thread(target=lambda: answers.append(room.ask("rae"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [a.json()["choices"][0]["text"] for a in answers] == ["hello"] * 8


# --- clients that do not read -------------------------------------------------------------------------


def _stuck(monkeypatch: pytest.MonkeyPatch, *, left: bool = False, stall_s: float = 0.2) -> exchange.Exchange:
    """A client whose connection takes nothing."""
    async def send(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(exchange, "STALL_S", stall_s)
    monkeypatch.setattr(exchange, "LOOK_S", 0.02)
    found = exchange.Exchange({"method": "POST", "path": "/", "headers": []}, send, send)  # type: ignore[arg-type]
    if left:
        found.left.set()
    return found


def test_a_client_that_does_not_read_is_left_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = time.monotonic()
    with pytest.raises(exchange.Gone):
        asyncio.run(_stuck(monkeypatch).piece(b"x", lambda: None))
    assert 0.15 < time.monotonic() - begun < 1
    with pytest.raises(exchange.Gone):
        asyncio.run(_stuck(monkeypatch, left=True, stall_s=60).piece(b"x", lambda: None))


def test_a_stop_reaches_a_call_whose_client_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def look() -> None:
        raise Halted("stopped")

    with pytest.raises(Halted):
        asyncio.run(_stuck(monkeypatch, stall_s=60).piece(b"x", look))
