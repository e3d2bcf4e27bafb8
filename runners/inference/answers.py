"""Answers as clients of the field read them: bodies, chunks of a stream, errors. Pure.

Where this differs from the field: `error.code` is ours (stable, dotted), `error.next_step` says what to do.
"""

import array
import base64
import json
import sys
from dataclasses import dataclass, field
from typing import Any

from interlock.errors import Refusal
from policy.snapshot import ModelRow
from runners.inference.parameters import Asked

_LINE_ENDS = "\x85\u2028\u2029"
DONE = b"data: [DONE]\n\n"
# What the libraries of the field call it, by status; they choose their exception by the status alone.
_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 405: "invalid_request_error",
          422: "invalid_request_error", 423: "permission_error", 429: "rate_limit_error"}


@dataclass
class Usage:
    """Tokens of one call. `estimated` when the engine could not say: then it is what was counted."""

    prompt: int = 0
    completion: int = 0
    estimated: bool = True

    def as_json(self) -> dict[str, int]:
        """Return the object that clients read."""
        return {"prompt_tokens": self.prompt, "completion_tokens": self.completion,
                "total_tokens": self.prompt + self.completion}


@dataclass(frozen=True)
class Shape:
    """The form of one call's answers. `id` of the call, `created` in seconds, `model` as it was asked for."""

    asked: Asked
    id: str
    created: int
    usage: Usage = field(default_factory=Usage)

    def whole(self, text: str, reason: str) -> dict[str, Any]:
        """Return the body of an answer in text that is not streamed."""
        if self.asked.kind == "chat":
            said: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
            name = "chat.completion"
        else:
            said, name = {"text": text}, "text_completion"
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": reason}
        return {**self._head(name), "choices": [choice], "usage": self.usage.as_json()}

    def first(self) -> bytes:
        """Return the event that opens a stream; nothing for completions."""
        return self._chunk({"role": "assistant", "content": ""}, None) if self.asked.kind == "chat" else b""

    def piece(self, text: str) -> bytes:
        """Return the event of a further piece of text."""
        return self._chunk({"content": text} if self.asked.kind == "chat" else text, None)

    def last(self, reason: str) -> bytes:
        """Return the events that close a stream: why it ended, the usage when it was asked for, [DONE]."""
        end = self._chunk({} if self.asked.kind == "chat" else "", reason)
        if self.asked.usage:
            end += event({**self._head(self._chunk_name()), "choices": [], "usage": self.usage.as_json()})
        return end + DONE

    def vectors(self, rows: list[list[float]]) -> dict[str, Any]:
        """Return the body of an answer in vectors."""
        data = [{"object": "embedding", "index": n, "embedding": _packed(r) if self.asked.packed else r}
                for n, r in enumerate(rows)]
        used = {"prompt_tokens": self.usage.prompt, "total_tokens": self.usage.prompt}
        return {"object": "list", "data": data, "model": self.asked.model, "usage": used}

    def _chunk_name(self) -> str:
        return "chat.completion.chunk" if self.asked.kind == "chat" else "text_completion"

    def _chunk(self, said: Any, reason: str | None) -> bytes:
        if self.asked.kind == "chat":
            choice = {"index": 0, "delta": said, "logprobs": None, "finish_reason": reason}
        else:
            choice = {"index": 0, "text": said, "logprobs": None, "finish_reason": reason}
        return event({**self._head(self._chunk_name()), "choices": [choice]})

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.asked.model}


def event(value: dict[str, Any]) -> bytes:
    """Return one server-sent event.

    Some readers take more than CR and LF for the end of a line, so those are spelled in ASCII, as JSON may.
    """
    data = encode(value)
    for line_end in _LINE_ENDS:
        data = data.replace(line_end.encode(), b"\\u%04x" % ord(line_end))
    return b"data: " + data + b"\n\n"


def encode(value: dict[str, Any]) -> bytes:
    """Return a body."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def error(refusal: Refusal, status: int) -> dict[str, Any]:
    """Return the body of a refusal. Its details stay inside but for the few that a client acts on."""
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    found = {"message": refusal.message, "type": kind, "code": refusal.code,
             "param": refusal.details.get("field"), "next_step": refusal.next_step}
    if "call" in refusal.details:
        found["call"] = refusal.details["call"]
    return {"error": found}


def models(rows: list[ModelRow]) -> dict[str, Any]:
    """Return the list of models that one caller may call."""
    data = [{"id": r.name, "object": "model", "created": 0, "owned_by": r.tenant, "tier": r.tier.value,
             "version": r.version} for r in rows]
    return {"object": "list", "data": data}


def _packed(row: list[float]) -> str:
    """Return a vector as clients unpack it: base64 of 32-bit floats, least significant byte first."""
    found = array.array("f", row)
    if sys.byteorder != "little":
        found.byteswap()
    return base64.b64encode(found.tobytes()).decode()
