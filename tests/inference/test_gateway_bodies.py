"""Bodies and parameters: one meaning for every reader, known fields alone, bounds. Pure."""

import json
import time
from typing import Any

import pytest

from interlock.errors import Malformed
from runners.inference import body, parameters

CHAT: dict[str, Any] = {"model": "luna", "messages": [{"role": "user", "content": "hi"}]}


def refused(data: bytes) -> str:
    with pytest.raises(Malformed) as found:
        body.read(data)
    return found.value.code


def test_a_plain_body_is_read() -> None:
    assert body.read('{"model": "luna", "n": [1, 2.5, null, "é\U0001f600"]}'.encode())["model"] == "luna"


@pytest.mark.parametrize("data", [
    b'{"model": "luna", "model": "astra"}', b'{"model": "luna", "\\u006dodel": "astra"}', b'{"a": {"b": 1, "b": 2}}',
    b'{"a": NaN}', b'{"a": -Infinity}', b'{"a": 1e999}', b"[1]", b'"x"', b"", b"{", b'{"a": 1} {"a": 2}',
    b'\xef\xbb\xbf{"a": 1}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b'{"\\udfff": 1}',
    b'{"a": ' + b"[" * 40 + b"]" * 40 + b"}", b"[" * 100_000, b'{"a":' * 5_000, b'{"a": ' + b"9" * 5_000 + b"}",
])
def test_refuses_what_two_readers_could_take_differently(data: bytes) -> None:
    assert refused(data) == "malformed.request"


def test_refuses_a_large_body_and_takes_one_of_just_that_size() -> None:
    fits = b'{"a": "' + b"x" * (body.LIMIT - 9) + b'"}'
    assert len(fits) == body.LIMIT
    body.read(fits)
    assert refused(fits + b" ") == "malformed.size"


@pytest.mark.parametrize("many", [b"[],", b"1,", b"{},", b'"",', b'{"a":[]},', b'"\\"",', b'"\\\\",'])
def test_refuses_very_many_values_before_one_of_them_is_made(many: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    few = b'{"a":[' + many * 5_000 + b'0]}'
    assert len(body.read(few)["a"]) == 5_001  # control
    monkeypatch.setattr("json.loads", lambda *_, **__: pytest.fail("it was read"))
    assert refused(b'{"a":[' + many * 20_000 + b'0]}') == "malformed.request"


@pytest.mark.parametrize("text", ["a,[{" * 200_000, '\\"[,' * 150_000, "\\\\" * 200_000, "\u20ac," * 100_000])
def test_a_long_text_is_one_value_whatever_it_holds(text: str) -> None:
    begun = time.thread_time()
    assert body.read(json.dumps({"a": text, "b": [text[:9]]}).encode())["a"] == text
    assert time.thread_time() - begun < 0.5


@pytest.mark.parametrize("data", [b'"' * 500_000, b'\\"' * 500_000, b'"\\' * 500_000, b'{"a":"' + b"x" * 900_000])
def test_a_text_without_end_costs_no_time(data: bytes) -> None:
    begun = time.thread_time()
    assert refused(data) == "malformed.request"
    assert time.thread_time() - begun < 0.5


@pytest.mark.parametrize("more", [
    {"max_tokens": 0}, {"max_tokens": parameters.MOST_TOKENS + 1}, {"max_tokens": True}, {"max_tokens": "9"},
    {"max_tokens": 5, "max_completion_tokens": 6}, {"temperature": 2.1}, {"temperature": -1}, {"temperature": "hot"},
    {"top_p": 1.5}, {"stop": ["a"] * 5}, {"stop": ["", "a"]}, {"stop": 3}, {"n": 2}, {"n": True}, {"stream": 1},
    {"seed": -1}, {"seed": 1.5}, {"stream_options": {"include_usage": True}}, {"tools": {}}, {"tools": ["x"]},
    {"model": ""}, {"model": "x" * 129}, {"model": "../x y"}, {"model": 3}, {"messages": []}, {"messages": "hi"},
    {"messages": [{"role": "root", "content": "x"}]}, {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    {"messages": [{"role": "user", "content": "x", "extra": 1}]}, {"logprobs": True},
    {"response_format": {"type": "x"}}, {"presence_penalty": 1}, {"profile": "full"}, {"terms": {}},
    {"x_interlock_profile": "full"}, {"tool_choice": "none!"},
])
def test_refuses_a_parameter_that_is_off_or_unknown(more: dict[str, Any]) -> None:
    assert parameters.chat(CHAT).max_tokens == parameters.CHAT_TOKENS  # control
    with pytest.raises(Malformed):
        parameters.chat({**CHAT, **more})


def test_extras_that_change_no_answer_are_ignored() -> None:
    more = {"user": "x", "metadata": {"a": "b"}, "n": 1, "presence_penalty": 0, "frequency_penalty": 0.0,
            "logprobs": False, "logit_bias": {}, "response_format": {"type": "text"}, "seed": None, "tools": []}
    assert parameters.chat({**CHAT, **more}) == parameters.chat(CHAT)


def test_what_a_call_asks_for_is_read() -> None:
    told = {"max_completion_tokens": 7, "temperature": 0, "top_p": 0.5, "stop": "x", "seed": 3, "stream": True,
            "stream_options": {"include_usage": True}, "tools": [{"type": "function"}]}
    found = parameters.chat({**CHAT, **told})
    assert (found.max_tokens, found.temperature, found.top_p, found.stop) == (7, 0.0, 0.5, ("x",))
    assert (found.seed, found.stream, found.usage, found.tools) == (3, True, True, ({"type": "function"},))
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "system", "content": parts}, {"role": "assistant", "content": None, "tool_calls": []}]
    assert parameters.chat({**CHAT, "messages": messages}).messages == (
        {"role": "system", "content": "ab"}, {"role": "assistant", "content": ""})
    assert parameters.completion({"model": "luna", "prompt": ["once"]}).prompt == "once"
    assert parameters.completion({"model": "luna", "prompt": "once"}).max_tokens == parameters.COMPLETION_TOKENS


@pytest.mark.parametrize("prompt", [["a", "b"], [1, 2], "", None, [[1]]])
def test_refuses_a_prompt_that_is_not_one_text(prompt: object) -> None:
    with pytest.raises(Malformed):
        parameters.completion({"model": "luna", "prompt": prompt})


@pytest.mark.parametrize("more", [{"input": []}, {"input": [""]}, {"input": [1]}, {"input": ["x"] * 257},
                                  {"encoding_format": "hex"}, {"dimensions": 3}])
def test_refuses_inputs_that_are_off(more: dict[str, Any]) -> None:
    given = {"model": "words", "input": ["a", "b"], "encoding_format": "base64"}
    assert parameters.embedding(given).inputs == ("a", "b")  # control
    with pytest.raises(Malformed):
        parameters.embedding({**given, **more})


def test_terms_and_profiles_are_no_parameters() -> None:
    """No field of a body can even carry a profile."""
    names = {name for name in json.dumps([sorted(parameters.IGNORED), sorted(parameters.NEUTRAL)]).split('"')}
    assert not {"profile", "terms", "tier", "tenant", "roles"} & names
    assert not {"profile", "terms"} & set(parameters.Asked.__dataclass_fields__)
