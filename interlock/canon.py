"""Canonical bytes and digests of the values that get signed, hashed or compared.

The schema admits only null, bool, int within ±2^53, str, list and dict with lower-case ASCII keys;
on that subset the output equals RFC 8785 (JCS) byte for byte. Floats are refused: 1.0, 1e16 and NaN
are where canonical encoders differ.
"""

import hashlib
import json
import re
from functools import lru_cache
from typing import Any

from interlock.errors import Malformed

_KEY = re.compile(r"[a-z0-9_.:/@-]{1,128}")
_MAX_INT = 2**53 - 1
_MAX_DEPTH = 16


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


@lru_cache(maxsize=4096)
def _good_key(key: str) -> bool:
    return _KEY.fullmatch(key) is not None


def _check(value: object, depth: int) -> None:
    """Refuse what has no canonical form. The exact types come first: this runs for every record."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return
    if depth > _MAX_DEPTH:
        raise Malformed("value is nested too deeply")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str) or not _good_key(key):
                raise Malformed("a key is not lower-case ASCII")
            _check(item, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            _check(item, depth + 1)
    elif isinstance(value, int) and not isinstance(value, bool):
        if abs(value) > _MAX_INT:
            raise Malformed("integer is outside ±(2^53-1)")
    elif not isinstance(value, str):
        raise Malformed(f"a {kind.__name__} has no canonical form")


def canonical(value: object) -> bytes:
    """Return the canonical UTF-8 JSON bytes of `value`.

    Raises Malformed on floats, bytes, big integers, lone surrogates and odd keys. Source: RFC 8785.
    """
    _check(value, 0)
    try:
        return _ENCODER.encode(value).encode("utf-8")
    except UnicodeEncodeError:
        raise Malformed("text holds a lone surrogate") from None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen = dict(pairs)
    if len(seen) != len(pairs):
        raise Malformed("a key occurs twice")
    return seen


def _no_float(_: str) -> Any:
    raise Malformed("a number is not an integer")


def parse(data: bytes, *, limit: int = 1 << 20) -> Any:
    """Parse canonical bytes; anything that would not re-encode to the very same bytes is refused.

    `limit` bounds the size in bytes. Raises Malformed.
    """
    if len(data) > limit:
        raise Malformed(f"larger than {limit} bytes")
    try:
        value = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_float=_no_float,
            parse_constant=_no_float,
        )
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise Malformed("not JSON") from None
    if canonical(value) != data:
        raise Malformed("not in canonical form")
    return value


def digest(value: object) -> str:
    """Return ``sha256:<hex>`` of the canonical bytes of `value`."""
    return digest_bytes(canonical(value))


def digest_bytes(data: bytes) -> str:
    """Return ``sha256:<hex>`` of `data`."""
    return "sha256:" + hashlib.sha256(data).hexdigest()
