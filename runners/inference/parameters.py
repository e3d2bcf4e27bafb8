"""The parameters of a call, read from its body: what we know, what we may ignore, and nothing else.

A field that we do not know is refused: an answer that silently ignores it would be another one than was asked for.
Clients of the field send some extras always; those are listed, as `IGNORED` (they change no answer) and `NEUTRAL`
(they change none as long as they have one of these values). null counts as not sent. Nothing here can say on which
terms a model answers.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from interlock.terms import FULL, PROFILES
from runners.inference.body import malformed
from runners.inference.frames import INPUTS, MESSAGES, ROLES, STOP_LENGTH, STOPS, TOOLS

MOST_TOKENS = PROFILES[FULL].max_tokens
CHAT_TOKENS, COMPLETION_TOKENS = 256, 16
SEED = 2**53 - 1
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}")
IGNORED = frozenset({
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls",
})
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "echo": (False,), "suffix": ("",), "logprobs": (False, 0), "top_logprobs": (0,),
    "logit_bias": ({},), "presence_penalty": (0,), "frequency_penalty": (0,), "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"), "modalities": (["text"],),
}
_SAMPLING = frozenset({"model", "max_tokens", "temperature", "top_p", "stop", "seed", "stream", "stream_options"})
_CHAT = _SAMPLING | {"messages", "max_completion_tokens", "tools"}
_COMPLETION = _SAMPLING | {"prompt"}
_EMBEDDING = frozenset({"model", "input", "encoding_format"})
_MESSAGE = frozenset({"role", "content", "name", "tool_call_id", "tool_calls", "refusal"})


@dataclass(frozen=True)
class Asked:
    """What a caller asked for. `kind`: chat, completion or embedding; `max_tokens` not yet cut to any terms."""

    kind: str
    model: str
    prompt: str = ""
    messages: tuple[dict[str, str], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    inputs: tuple[str, ...] = ()
    max_tokens: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None
    stream: bool = False
    usage: bool = False
    packed: bool = False


def chat(body: dict[str, Any]) -> Asked:
    """Return the parameters of /v1/chat/completions; raises Malformed."""
    found = _known(body, _CHAT)
    messages = tuple(_message(m) for m in _list(found, "messages", MESSAGES))
    tools = tuple(_list(found, "tools", TOOLS)) if "tools" in found else ()
    if not messages:
        raise malformed("messages are empty", field="messages")
    if not all(isinstance(t, dict) for t in tools):
        raise malformed("tools are objects", field="tools")
    named = [k for k in ("max_tokens", "max_completion_tokens") if k in found]
    if len(named) == 2 and found["max_tokens"] != found["max_completion_tokens"]:
        raise malformed("max_tokens and max_completion_tokens differ", field="max_completion_tokens")
    most = _integer(found, named[0], 1, MOST_TOKENS) if named else CHAT_TOKENS
    return Asked("chat", _model(found), messages=messages, tools=tools, max_tokens=most, **_sampling(found))


def completion(body: dict[str, Any]) -> Asked:
    """Return the parameters of /v1/completions; raises Malformed."""
    found = _known(body, _COMPLETION)
    prompt = found.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise malformed("prompt is one text", field="prompt")
    most = _integer(found, "max_tokens", 1, MOST_TOKENS) if "max_tokens" in found else COMPLETION_TOKENS
    return Asked("completion", _model(found), prompt=prompt, max_tokens=most, **_sampling(found))


def embedding(body: dict[str, Any]) -> Asked:
    """Return the parameters of /v1/embeddings; raises Malformed."""
    found = _known(body, _EMBEDDING)
    given = found.get("input")
    inputs = [given] if isinstance(given, str) else given
    if not isinstance(inputs, list) or not 1 <= len(inputs) <= INPUTS:
        raise malformed(f"input is a text or a list of 1 to {INPUTS}", field="input")
    if not all(isinstance(i, str) and i for i in inputs):
        raise malformed("each input is a text that is not empty", field="input")
    form = found.get("encoding_format", "float")
    if form not in ("float", "base64"):
        raise malformed("encoding_format is float or base64", field="encoding_format")
    return Asked("embedding", _model(found), inputs=tuple(inputs), packed=form == "base64")


READERS: Mapping[str, Callable[[dict[str, Any]], Asked]] = {
    "chat": chat, "completion": completion, "embedding": embedding,
}


def _known(body: dict[str, Any], known: frozenset[str]) -> dict[str, Any]:
    """Return the fields that we act on; raises Malformed for one that we do not know."""
    found = {}
    for name, value in body.items():
        if value is None or name in IGNORED:
            continue
        if name in known:
            found[name] = value
        elif name not in NEUTRAL or not any(value == v and type(value) is type(v) for v in _values(name)):
            raise malformed("a field of the body is not supported, or not with this value", field=name[:64])
    return found


def _values(name: str) -> tuple[Any, ...]:
    return tuple(x for v in NEUTRAL[name] for x in ((v, float(v)) if type(v) is int else (v,)))


def _model(found: dict[str, Any]) -> str:
    name = found.get("model")
    if not isinstance(name, str) or not _MODEL.fullmatch(name):
        raise malformed("model is a name of 1 to 128 letters, digits and ._:/@-", field="model")
    return name


def _sampling(found: dict[str, Any]) -> dict[str, Any]:
    stop = found.get("stop", [])
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > STOPS:
        raise malformed(f"stop is a text or a list of at most {STOPS}", field="stop")
    if not all(isinstance(s, str) and 1 <= len(s) <= STOP_LENGTH for s in stops):
        raise malformed(f"a stop text has 1 to {STOP_LENGTH} characters", field="stop")
    stream, options = _flag(found, "stream"), found.get("stream_options", {})
    if not isinstance(options, dict) or not set(options) <= {"include_usage", "include_obfuscation"}:
        raise malformed("stream_options has include_usage alone", field="stream_options")
    if options and not stream:
        raise malformed("stream_options is for streams", field="stream_options")
    return {
        "temperature": _real(found, "temperature", 2.0), "top_p": _real(found, "top_p", 1.0), "stop": tuple(stops),
        "seed": _integer(found, "seed", 0, SEED) if "seed" in found else None,
        "stream": stream, "usage": _flag(options, "include_usage"),
    }


def _flag(found: dict[str, Any], name: str) -> bool:
    value = found.get(name, False)
    if not isinstance(value, bool):
        raise malformed(f"{name} is true or false", field=name)
    return value


def _integer(found: dict[str, Any], name: str, low: int, high: int) -> int:
    value = found[name]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise malformed(f"{name} is an integer of {low} to {high}", field=name)
    return value


def _real(found: dict[str, Any], name: str, high: float) -> float:
    value = found.get(name, 1.0)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= high:
        raise malformed(f"{name} is a number of 0 to {high:g}", field=name)
    return float(value)


def _list(found: dict[str, Any], name: str, most: int) -> list[Any]:
    value = found.get(name)
    if not isinstance(value, list) or len(value) > most:
        raise malformed(f"{name} is a list of at most {most}", field=name)
    return value


def _message(value: object) -> dict[str, str]:
    """Return role and text of one message; text parts are joined, other parts are refused."""
    if not isinstance(value, dict) or not set(value) <= _MESSAGE or value.get("role") not in ROLES:
        raise malformed("a message has a role and a content", field="messages")
    content = value.get("content")
    if content is None and value["role"] == "assistant":
        content = ""
    if isinstance(content, list):
        content = "".join(_part(p) for p in content)
    if not isinstance(content, str):
        raise malformed("the content of a message is a text or a list of text parts", field="messages")
    return {"role": value["role"], "content": content}


def _part(value: object) -> str:
    if not isinstance(value, dict) or set(value) != {"type", "text"} or value["type"] != "text":
        raise malformed("a part of a message is {type: text, text}", field="messages")
    if not isinstance(value["text"], str):
        raise malformed("a part of a message is {type: text, text}", field="messages")
    return value["text"]
