"""What gateway and engine say to each other, byte for byte. Format: docs/formats/engine.md.

Standard library and interlock only: the gateway uses this file in the node's environment, the engine in the guest
environment. A frame is a length and one JSON object. Unlike a canonical value it may hold floats (temperature,
vectors); a key that occurs twice, NaN and Infinity are refused, for two readers could take them differently.
"""

import json
import math
import socket
import struct
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from interlock.call import number, text, texts
from interlock.errors import Denied, Malformed, NotFound
from interlock.terms import PROFILES, Terms

LIMIT = 4 << 20
CONNECTIONS = 16
SOCKET = "/run/interlock/engine.sock"
SOCKET_ENV = "INTERLOCK_ENGINE_SOCKET"
HEADER = 4
STOPS, STOP_LENGTH = 4, 256
INPUTS = 256
MESSAGES, TOOLS = 1024, 128
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})

Kind = Literal["text", "embedding"]
Reason = Literal["stop", "length", "aborted"]


# --- bytes --------------------------------------------------------------------------------------------


def encode(value: dict[str, Any]) -> bytes:
    """Return one frame, its length in front; raises Malformed when it is over `LIMIT` or no JSON."""
    try:
        body = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError):
        raise Malformed("a frame holds something that is not JSON", code="frame") from None
    return struct.pack(">I", _bounded(len(body))) + body


def length(header: bytes) -> int:
    """Return how many bytes follow these `HEADER` bytes; raises Malformed over `LIMIT`, before anything is read."""
    return _bounded(int(struct.unpack(">I", header)[0]))


def _bounded(size: int) -> int:
    if not 2 <= size <= LIMIT:
        raise Malformed(f"a frame has 2 to {LIMIT} bytes", code="frame")
    return size


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("a key of a frame occurs twice", code="frame")
    return found


def _finite(word: str) -> float:
    found = float(word)
    if not math.isfinite(found):
        raise Malformed("a frame holds a number that is not finite", code="frame")
    return found


def decode(body: bytes) -> dict[str, Any]:
    """Parse the bytes behind a header; raises Malformed when they are no JSON object, or one that is ambiguous."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise Malformed("a frame is not JSON", code="frame") from None
    if not isinstance(value, dict):
        raise Malformed("a frame is not an object", code="frame")
    if b"\\u" in body:
        encode(value)  # half a surrogate pair has no bytes: refused here, not somewhere inside a tokenizer
    return value


def send(line: socket.socket, value: dict[str, Any]) -> None:
    """Write one frame to a blocking socket; raises Malformed and OSError."""
    line.sendall(encode(value))


def receive(line: socket.socket) -> dict[str, Any] | None:
    """Read one frame from a blocking socket; None when the other side closed between two frames.

    Raises Malformed, also for an end in the middle of a frame, and OSError.
    """
    header = _exactly(line, HEADER)
    if not header:
        return None
    body = _exactly(line, length(header))
    if not body:
        raise Malformed("a frame ends before its length", code="frame")
    return decode(body)


def _exactly(line: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = line.recv(min(size - len(found), 1 << 16))
        if not piece:
            if found:
                raise Malformed("a frame ends before its length", code="frame")
            return b""
        found += piece
    return bytes(found)


# --- engine → gateway ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The first frame of a connection: who dials. `version` the digest that it loaded, `context` its tokens."""

    run: str
    attempt: int
    version: str
    kind: Kind
    context: int
    name: str

    def as_json(self) -> dict[str, Any]:
        """Return the frame."""
        return {"hello": {"run": self.run, "attempt": self.attempt, "version": self.version, "kind": self.kind,
                          "context": self.context, "name": self.name}}

    @classmethod
    def from_json(cls, frame: dict[str, Any]) -> Self:
        """Parse `as_json`; raises Malformed on anything but exactly these fields."""
        found = frame.get("hello")
        if set(frame) != {"hello"} or not isinstance(found, dict) or set(found) != _HELLO:
            raise Malformed("an engine first says who it is", code="hello")
        kind = found["kind"]
        if kind not in ("text", "embedding"):
            raise Malformed("an engine makes text or embeddings", code="hello")
        return cls(text(found, "run", limit=128), number(found, "attempt", low=1), text(found, "version", limit=80),
                   kind, number(found, "context", low=1, high=1 << 30), text(found, "name", limit=256))


_HELLO = frozenset({"run", "attempt", "version", "kind", "context", "name"})


def delta(call: str, piece: str, tokens: int) -> dict[str, Any]:
    """Return the frame of a further piece of text; `tokens` were made since the frame before."""
    return {"id": call, "delta": piece, "tokens": tokens}


def done(call: str, reason: Reason, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """Return the last frame of an answer in text."""
    return {"id": call, "done": {"reason": reason, "prompt_tokens": prompt_tokens,
                                 "completion_tokens": completion_tokens}}


def vectors(call: str, rows: list[list[float]], prompt_tokens: int) -> dict[str, Any]:
    """Return the only frame of an answer in vectors, one row for each input."""
    return {"id": call, "vectors": rows, "prompt_tokens": prompt_tokens}


# --- gateway → engine ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Complete:
    """One call for text: either `prompt` or `messages` (role and content, both text) with `tools`.

    `max_tokens` of the answer, clamped by `terms`; `temperature` 0 is greedy; `stop` ends the answer before the
    first of these texts; `seed` makes sampling repeatable.
    """

    id: str
    terms: Terms
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()
    tools: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    seed: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the frame."""
        said: dict[str, Any] = {"messages": list(self.messages), "tools": list(self.tools)}
        if self.prompt is not None:
            said = {"prompt": self.prompt}
        return {"id": self.id, "op": "complete", **said, "max_tokens": self.max_tokens,
                "temperature": self.temperature, "top_p": self.top_p, "stop": list(self.stop), "seed": self.seed,
                "terms": self.terms.as_json()}


@dataclass(frozen=True)
class Embed:
    """One call for vectors, one for each text of `input`."""

    id: str
    terms: Terms
    input: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return the frame."""
        return {"id": self.id, "op": "embed", "input": list(self.input), "terms": self.terms.as_json()}


_COMPLETE = frozenset({"id", "op", "prompt", "messages", "tools", "max_tokens", "temperature", "top_p", "stop",
                       "seed", "terms"})


def request(frame: dict[str, Any]) -> Complete | Embed:
    """Parse the frame of a call; unknown fields are refused.

    The terms come first: no call without them, and none whose terms are wider than the profile that they name.
    What is returned is already cut down to its terms (`within`). Raises Malformed (``malformed.terms``,
    ``malformed.request``), Denied (``denied.terms``), NotFound (``not_found.op``).
    """
    terms = _terms(frame)
    op, call = frame.get("op"), text(frame, "id", limit=128)
    if op == "embed":
        _only(frame, frozenset({"id", "op", "input", "terms"}))
        found = texts(frame, "input", limit=INPUTS)
        if not found:
            raise Malformed("there is nothing to embed", code="request")
        return Embed(call, terms, found)
    if op != "complete":
        raise NotFound("an engine has no such operation", code="op", next_step="use complete or embed")
    _only(frame, _COMPLETE)
    if ("prompt" in frame) == ("messages" in frame):
        raise Malformed("a call has a prompt or messages, not both", code="request")
    prompt = frame.get("prompt")
    if "prompt" in frame and (not isinstance(prompt, str) or frame.get("tools")):
        raise Malformed("a prompt is a text, and comes without tools", code="request")
    asked = Complete(
        call, terms, prompt, () if prompt is not None else _messages(frame["messages"]), _tools(frame.get("tools", [])),
        number(frame, "max_tokens", low=1, high=1 << 20), _real(frame, "temperature", 2.0), _real(frame, "top_p", 1.0),
        _stops(frame), _seed(frame),
    )
    return within(asked)


def within(asked: Complete) -> Complete:
    """Return the call cut down to its own terms: no more tokens than they allow, tools only where they allow any."""
    tools = asked.tools if asked.terms.tools else ()
    return replace(asked, max_tokens=min(asked.max_tokens, asked.terms.max_tokens), tools=tools)


def _terms(frame: dict[str, Any]) -> Terms:
    terms = Terms.from_json(frame.get("terms"))
    if PROFILES.get(terms.profile) != terms:
        raise Denied("the terms of a call are not those of the profile that they name", code="terms")
    return terms


def _only(frame: dict[str, Any], known: frozenset[str]) -> None:
    unknown = set(frame) - known
    if unknown:
        raise Malformed("a call holds a field that an engine does not know", code="request",
                        details={"field": sorted(unknown)[0][:64]})


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not 1 <= len(value) <= MESSAGES:
        raise Malformed(f"messages are a list of 1 to {MESSAGES}", code="request")
    for one in value:
        if not isinstance(one, dict) or set(one) != {"role", "content"} or not isinstance(one["content"], str):
            raise Malformed("a message has a role and a text", code="request")
        if one["role"] not in ROLES:
            raise Malformed("a message has a role that nobody plays", code="request")
    return tuple(value)


def _tools(value: object) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or len(value) > TOOLS or not all(isinstance(one, dict) for one in value):
        raise Malformed(f"tools are a list of at most {TOOLS} objects", code="request")
    return tuple(value)


def _real(frame: dict[str, Any], key: str, high: float) -> float:
    found = frame.get(key, 1.0)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 <= found <= high:
        raise Malformed(f"field {key!r} is not a number in [0, {high}]", code="request")
    return float(found)


def _stops(frame: dict[str, Any]) -> tuple[str, ...]:
    found = texts(frame, "stop", limit=STOPS) if "stop" in frame else ()
    if not all(1 <= len(one) <= STOP_LENGTH for one in found):
        raise Malformed(f"a stop sequence has 1 to {STOP_LENGTH} characters", code="request")
    return found


def _seed(frame: dict[str, Any]) -> int | None:
    return None if frame.get("seed") is None else number(frame, "seed")
