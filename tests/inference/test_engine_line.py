"""The engine's line without a model: hello, one call after the other, abort, terms, stop sequences, broken frames."""

import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Denied, Malformed, NotFound, TooMany
from interlock.terms import FULL, PROFILES, RESTRICTED
from runners.inference import frames
from runners.inference.dialing import Answer
from runners.inference.frames import Complete, Embed, Hello
from runners.inference.pieces import Pieces
from tests.inference.stand_in import VERSION, Script, StandIn
from tests.inference.switchboard import Switchboard, answer, text

HELLO = Hello("run_1", 1, VERSION, "text", 4096, "luna")


def call(**fields: Any) -> dict[str, Any]:
    return {**Complete("req_1", PROFILES[FULL], prompt="once").as_json(), **fields}


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Switchboard]:
    with Switchboard(str(tmp_path / "engine.sock")) as found:
        yield found


def hung_up(line: socket.socket) -> bool:
    """Read to the end; what was sent and not read makes it a reset."""
    try:
        while line.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def wait_for(what: Any, seconds: float = 5.0) -> float:
    begun = time.monotonic()
    while not what():
        assert time.monotonic() - begun < seconds, "it did not happen"
        time.sleep(0.002)
    return time.monotonic() - begun


# --- frames -------------------------------------------------------------------------------------------


def test_a_frame_comes_back_as_it_was() -> None:
    value = {"a": [0.5, "é\n", None, {"b": True}]}
    data = frames.encode(value)
    assert frames.length(data[:4]) == len(data) - 4
    assert frames.decode(data[4:]) == value


@pytest.mark.parametrize("body", [
    b'{"a":1,"a":2}', b'{"a":{"b":1,"\\u0062":2}}', b'{"a":NaN}', b'{"a":-Infinity}', b'{"a":1e999}',
    b'{"a":"\\ud800"}', b"[]", b"{", b'{"a":' * 9000, b"\xff\xfe",
])
def test_a_frame_that_two_readers_could_take_differently_is_refused(body: bytes) -> None:
    assert frames.decode(b'{"a":1,"b":2e3}') == {"a": 1, "b": 2000.0}
    with pytest.raises(Malformed) as refused:
        frames.decode(body)
    assert refused.value.code == "malformed.frame"


def test_a_length_over_the_limit_is_refused_before_anything_is_read() -> None:
    assert frames.length(struct.pack(">I", frames.LIMIT)) == frames.LIMIT
    for size in (frames.LIMIT + 1, 2**32 - 1, 0):
        with pytest.raises(Malformed):
            frames.length(struct.pack(">I", size))
    with pytest.raises(Malformed):
        frames.encode({"a": "x" * frames.LIMIT})


def test_a_frame_that_ends_early_is_not_an_end() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.sendall(frames.encode({"a": 1})[:-1])
        here.close()
        with pytest.raises(Malformed):
            frames.receive(there)
    here, there = socket.socketpair()
    with here, there:
        frames.send(here, {"a": 1})
        here.close()
        assert frames.receive(there) == {"a": 1}
        assert frames.receive(there) is None


# --- what a call is -----------------------------------------------------------------------------------


def test_a_hello_comes_back_as_it_was_and_nothing_else_is_one() -> None:
    assert Hello.from_json(HELLO.as_json()) == HELLO
    for spoilt in ({}, {"hello": {}}, {**HELLO.as_json(), "id": "x"},
                   {"hello": {**HELLO.as_json()["hello"], "kind": "image"}}):
        with pytest.raises(Malformed):
            Hello.from_json(spoilt)


def test_calls_come_back_as_they_were() -> None:
    said = Complete("a", PROFILES[FULL], prompt="x", max_tokens=7, temperature=0.5, top_p=0.9, stop=("\n",), seed=3)
    talked = Complete("a", PROFILES[FULL], messages=({"role": "user", "content": "x"},), tools=({"type": "f"},))
    asked = Embed("a", PROFILES[RESTRICTED], ("x", "y"))
    for one in (said, talked, asked):
        assert frames.request(json.loads(json.dumps(one.as_json()))) == one


def test_a_call_is_cut_down_to_its_terms() -> None:
    tools, messages = [{"type": "function"}], [{"role": "user", "content": "x"}]
    frame = call(messages=messages, tools=tools, max_tokens=4000)
    del frame["prompt"]
    full = frames.request(frame)
    assert isinstance(full, Complete)
    assert (full.max_tokens, full.tools) == (4000, tuple(tools))
    less = frames.request({**frame, "terms": PROFILES[RESTRICTED].as_json()})
    assert isinstance(less, Complete)
    assert (less.max_tokens, less.tools) == (PROFILES[RESTRICTED].max_tokens, ())


@pytest.mark.parametrize("terms", [None, {}, {"profile": "full"}, "full"])
def test_a_call_without_terms_is_refused_before_anything_else_of_it_is_read(terms: object) -> None:
    assert frames.request(call())
    with pytest.raises(Malformed) as refused:
        frames.request({"op": "nonsense", "terms": terms})
    assert refused.value.code == "malformed.terms"


@pytest.mark.parametrize("change", [
    {"max_tokens": 4096}, {"tools": True}, {"withhold": False}, {"profile": "unbound"}, {"profile": FULL},
])
def test_terms_wider_than_their_profile_are_refused(change: dict[str, Any]) -> None:
    terms = PROFILES[RESTRICTED].as_json()
    assert frames.request(call(terms=terms))
    with pytest.raises(Denied) as refused:
        frames.request(call(terms={**terms, **change}))
    assert refused.value.code == "denied.terms"


@pytest.mark.parametrize("fields", [
    {"messages": [{"role": "user", "content": "x"}]}, {"prompt": 3}, {"tools": [{}]}, {"max_tokens": 0},
    {"temperature": 2.5}, {"temperature": True}, {"top_p": -0.1}, {"stop": ["a"] * 5}, {"stop": [""]}, {"seed": -1},
    {"n": 2}, {"id": ""}, {"id": "x" * 129}, {"stop": "a"},
])
def test_a_call_that_is_off_is_refused(fields: dict[str, Any]) -> None:
    assert frames.request(call())
    with pytest.raises(Malformed):
        frames.request(call(**fields))


@pytest.mark.parametrize("messages", [
    [], "x", [{"role": "user"}], [{"role": "root", "content": "x"}], [{"role": "user", "content": ["x"]}],
    [{"role": "user", "content": "x", "name": "y"}],
])
def test_messages_that_are_off_are_refused(messages: object) -> None:
    frame = call(messages=[{"role": "user", "content": "x"}])
    del frame["prompt"]
    assert frames.request(frame)
    with pytest.raises(Malformed):
        frames.request({**frame, "messages": messages})


def test_an_operation_that_is_none_is_refused() -> None:
    with pytest.raises(NotFound):
        frames.request(call(op="load_model"))


# --- text in pieces -----------------------------------------------------------------------------------


def of_bytes(tokens: Any) -> str:
    return bytes(tokens).decode(errors="replace")


def told(data: bytes, *stops: str, at_once: int = 1) -> tuple[list[str], bool]:
    pieces = Pieces(of_bytes, stops)
    found = [pieces.push(list(data[i:i + at_once])) for i in range(0, len(data), at_once)]
    return [one for one in [*found, pieces.finish()] if one], pieces.stopped


def test_no_piece_holds_half_a_character() -> None:
    text_ = "añ🎈日本 end"
    assert told(text_.encode()) == (list(text_), False)
    assert told("🎈".encode()[:3]) == ([], False)
    assert told("a🎈".encode()[:4]) == (["a"], False)


def test_bytes_that_are_no_text_do_not_hold_the_answer_back_for_ever() -> None:
    found, _ = told(b"a" + b"\xff" * 40 + b"b")
    assert found[0] == "a"
    assert "".join(found) == "a" + "\N{REPLACEMENT CHARACTER}" * 40 + "b"
    assert len(found) > 3


@pytest.mark.parametrize("at_once", [1, 2, 5, 99])
def test_an_answer_ends_before_its_stop_sequence_wherever_the_tokens_end(at_once: int) -> None:
    found, stopped = told(b"one two three", "two", at_once=at_once)
    assert ("".join(found), stopped) == ("one ", True)
    found, stopped = told(b"one tw", "two", at_once=at_once)
    assert ("".join(found), stopped) == ("one tw", False)
    found, stopped = told(b"aaab", "aab", "b", at_once=at_once)
    assert ("".join(found), stopped) == ("a", True)


def test_what_may_become_a_stop_sequence_is_held_back() -> None:
    pieces = Pieces(of_bytes, ("END",))
    assert pieces.push(list(b"xE")) == "x"
    assert pieces.push(list(b"N")) == ""
    assert pieces.push(list(b"T")) == "ENT"


# --- the line -----------------------------------------------------------------------------------------


def test_an_engine_says_who_it_is_then_answers_on_the_same_line(board: Switchboard, tmp_path: Path) -> None:
    with StandIn(str(tmp_path / "engine.sock"), Script(text="so it was"), connections=2) as engine:
        for _ in range(5):
            found = board.call(call())
            assert text(found) == "so it was"
            assert sum(f.get("tokens", 0) for f in found) == 10
            assert found[-1]["done"] == {"reason": "stop", "prompt_tokens": 3, "completion_tokens": 10}
            assert {f["id"] for f in found} == {"req_1"}
        assert board.hellos == [HELLO.as_json()] * 2
        assert engine.script.aborted_at == []


def test_a_bound_ends_an_answer_with_length(board: Switchboard, tmp_path: Path) -> None:
    with StandIn(str(tmp_path / "engine.sock"), Script(text="x" * 99)):
        found = board.call(call(terms=PROFILES[RESTRICTED].as_json(), max_tokens=4096))
        assert found[-1]["done"] == {"reason": "length", "prompt_tokens": 3, "completion_tokens": 32}
        assert len(text(found)) == 32


def test_a_stop_sequence_ends_the_answer_and_the_making_of_it(board: Switchboard, tmp_path: Path) -> None:
    with StandIn(str(tmp_path / "engine.sock"), Script(text="one two" + "x" * 500, pace_s=0.002)) as engine:
        found = board.call(call(stop=["two"]))
        assert (text(found), found[-1]["done"]["reason"]) == ("one ", "stop")
        made = engine.script.aborted_at[0]
        assert 7 <= made < 50


@pytest.mark.parametrize("think_s", [5.0, 0.0])
def test_a_gateway_that_hangs_up_aborts_the_call(board: Switchboard, tmp_path: Path, think_s: float) -> None:
    script = Script(text="x" * 3000, pace_s=0.002, think_s=think_s)
    with StandIn(str(tmp_path / "engine.sock"), script, connections=1):
        with board.line() as line:
            frames.send(line, call())
            wait_for(lambda: script.asked)
            if not think_s:
                next(answer(line))
            line.close()
        assert wait_for(lambda: script.aborted_at) < 0.25
        script.text, script.think_s = "anew", 0.0
        assert text(board.call(call())) == "anew"  # it dialled again


def test_an_embedding_is_aborted_too(board: Switchboard, tmp_path: Path) -> None:
    script = Script(kind="embedding", think_s=5.0)
    with StandIn(str(tmp_path / "engine.sock"), script, connections=1):
        with board.line() as line:
            frames.send(line, Embed("e", PROFILES[FULL], ("x",)).as_json())
            wait_for(lambda: script.embedded)
            line.close()
        begun = time.monotonic()
        script.think_s = 0.0
        found = board.call(Embed("e", PROFILES[FULL], ("one two", "three")).as_json())
        assert time.monotonic() - begun < 1.0
        assert found == [{"id": "e", "vectors": [[1.0, 7.0], [1.0, 5.0]], "prompt_tokens": 3}]


def test_a_gateway_that_speaks_out_of_turn_is_hung_up_on(board: Switchboard, tmp_path: Path) -> None:
    script = Script(text="x" * 3000, pace_s=0.002)
    with StandIn(str(tmp_path / "engine.sock"), script, connections=1), board.line() as line:
        frames.send(line, call())
        next(answer(line))
        frames.send(line, call(id="req_2"))
        wait_for(lambda: script.aborted_at)
        assert hung_up(line)
        line.close()
        assert len(script.asked) == 1


@pytest.mark.parametrize("data", [
    struct.pack(">I", frames.LIMIT + 1), struct.pack(">I", 2) + b"[]", b"GET / HTTP/1.1\r\n",
])
def test_a_frame_that_cannot_be_read_ends_the_line(board: Switchboard, tmp_path: Path, data: bytes) -> None:
    with StandIn(str(tmp_path / "engine.sock"), connections=1) as engine:
        with board.line() as line:
            line.sendall(data)
            assert hung_up(line)
            line.close()
        assert text(board.call(call())) == engine.script.text


def test_a_refusal_names_the_call_and_keeps_the_line(board: Switchboard, tmp_path: Path) -> None:
    script = Script(text="fine")
    with StandIn(str(tmp_path / "engine.sock"), script, connections=1):
        refused = call()
        del refused["terms"]
        other = Embed("req_1", PROFILES[FULL], ("x",)).as_json()
        for frame, code in ((refused, "malformed.terms"), (other, "not_found.op")):
            found = board.call(frame)
            assert [(f["id"], f["error"]["code"]) for f in found] == [("req_1", code)]
        script.refusal = TooMany("not now")
        assert board.call(call())[0]["error"]["code"] == "too_many"
        script.refusal = None
        assert text(board.call(call())) == "fine"
        assert len(board.hellos) == 1


def test_what_a_library_raises_reaches_nobody(board: Switchboard, tmp_path: Path, capfd: Any) -> None:
    class Careless(Script):
        def decode(self, tokens: Any) -> str:
            raise RuntimeError("the canary sang")

    with StandIn(str(tmp_path / "engine.sock"), Careless(), connections=1):
        found = board.call(call())
        assert found[-1]["error"]["code"] == "unavailable.engine"
        assert "canary" not in json.dumps(found) + "".join(capfd.readouterr())


def test_an_engine_that_ends_says_aborted(board: Switchboard, tmp_path: Path) -> None:
    script, found = Script(text="x" * 3000, pace_s=0.01), []
    with StandIn(str(tmp_path / "engine.sock"), script, connections=1), board.line() as line:
        frames.send(line, call())
        reader = threading.Thread(target=lambda: found.extend(answer(line)))
        reader.start()
        wait_for(lambda: script.made > 3)
    reader.join(5)
    assert found[-1]["done"]["reason"] == "aborted"


def test_tokens_that_come_late_touch_no_other_file() -> None:
    """The event's number is free once the call has ended: a late token would be written into whatever has it next."""
    wake = os.eventfd(0, os.EFD_NONBLOCK)
    try:
        late = Answer("a", 1, frozenset(), wake)
        late.put([1])
        assert (os.eventfd_read(wake), late.take(), late.made) == (1, [1], 1)
        late.close()
        late.put([2], over=True)
        assert (late.take(), late.made) == ([], 1)
        with pytest.raises(BlockingIOError):
            os.eventfd_read(wake)
    finally:
        os.close(wake)


def test_eight_calls_at_once_are_answered_each_with_its_own(board: Switchboard, tmp_path: Path) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    with StandIn(str(tmp_path / "engine.sock"), Script(text="together", pace_s=0.01), connections=8):
        begun = time.monotonic()
        threads = [threading.Thread(target=lambda n=n: found.update({n: board.call(call(id=n))})) for n in "abcdefgh"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert time.monotonic() - begun < 2.0
    assert {n: {f["id"] for f in answered} for n, answered in found.items()} == {n: {n} for n in "abcdefgh"}
    assert {text(answered) for answered in found.values()} == {"together"}
