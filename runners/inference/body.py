"""Bodies as they come from outside: JSON of one meaning, bounded in size and depth.

Two readers of `{"model": "a", "model": "b"}` may take different ones, and one of them would be past the gate; the
same goes for NaN, which some refuse. So whatever is not the same for every reader is refused here.
"""

import json
import math
import re
from typing import Any

from interlock.errors import Malformed

LIMIT = 1 << 20
DEPTH = 32
VALUES = 16_384
# A text, to its end or, where it has none, to that of the body: each byte is looked at once, whatever it holds.
_TEXT = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)


def malformed(words: str, code: str = "request", **details: str) -> Malformed:
    """Return the refusal of a body."""
    return Malformed(words, code=code, next_step="see GET /openapi.json", details=dict(details))


def read(data: bytes) -> dict[str, Any]:
    """Return the object in `data`.

    Raises Malformed (``malformed.size`` over 1 MiB, ``malformed.request``): not UTF-8, not one JSON object, a key
    that occurs twice after unescaping, NaN or Infinity, half of a surrogate pair, nested over 32 deep, more than
    16,384 values.
    """
    if len(data) > LIMIT:
        raise too_large()
    _count(data)
    try:
        value = json.loads(data.decode(), object_pairs_hook=_once, parse_float=_finite, parse_constant=_finite)
    except (ValueError, RecursionError):
        raise malformed("the body is not JSON in UTF-8") from None
    if not isinstance(value, dict):
        raise malformed("the body is not a JSON object")
    _walk(value)
    return value


def too_large() -> Malformed:
    """Return the refusal of a body over `LIMIT`."""
    return malformed(f"the body is larger than {LIMIT} bytes", "size")


def _count(data: bytes) -> None:
    """Refuse very many values before one of them is made: all calls wait while a body is read."""
    rest = _TEXT.sub(b"", data)
    if rest.count(b",") + rest.count(b"[") + rest.count(b"{") > VALUES:
        raise malformed(f"the body has more than {VALUES} values")


def opened(data: bytes, enough: int) -> int:
    """Return how many lists and objects JSON `data` opens; where a glance shows that they are at most `enough`, that
    glance: it also counts brackets inside texts."""
    found = data.count(b"[") + data.count(b"{")
    if found <= enough:
        return found
    rest = _TEXT.sub(b"", data)
    return rest.count(b"[") + rest.count(b"{")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise malformed("a key of the body occurs twice")
    return found


def _finite(word: str) -> float:
    found = float(word)
    if not math.isfinite(found):
        raise malformed("the body holds a number that is not finite")
    return found


def _walk(value: dict[str, Any]) -> None:
    """Refuse what is nested too deeply, and text that has no UTF-8 form."""
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        one, depth = todo.pop()
        if isinstance(one, str):
            _text(one)
        elif isinstance(one, dict | list):
            if depth > DEPTH:
                raise malformed(f"the body is nested more than {DEPTH} deep")
            if isinstance(one, dict):
                todo.extend((k, depth) for k in one)
                todo.extend((v, depth + 1) for v in one.values())
            else:
                todo.extend((v, depth + 1) for v in one)


def _text(one: str) -> None:
    if not one.isascii():
        try:
            one.encode()
        except UnicodeEncodeError:
            raise malformed("a text of the body holds half of a surrogate pair") from None
