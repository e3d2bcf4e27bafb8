"""Where the tensors and values of a checkpoint lie in its sealed files, as JSON. No torch here.

This is what DCP keeps in a pickle. Ours is data: the bytes come out of a sealed file, every field is checked, and
nothing in it can name code. Values (numbers, text, lists) have their own small encoding below.
"""

import base64
import binascii
import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from interlock.errors import Malformed, Untrusted
from interlock.manifest import file_name

FORMAT: Final = "interlock/checkpoint/v1"
METADATA: Final = "metadata.sealed"
ASSETS: Final = "assets.sealed"
MAX_BYTES: Final = 256 << 20
MAX_DEPTH: Final = 64
# Bytes of one element, by the dtype's name in torch. A dtype that is not here is refused, not guessed.
DTYPES: Final[Mapping[str, int]] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex32": 4, "complex64": 8, "complex128": 16,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}
_MAX_INT = 2**53 - 1


def broken(why: str) -> Untrusted:
    """Return the refusal of a layout that contradicts itself or its files."""
    return Untrusted(
        f"the checkpoint's own description is off: {why}", code="layout",
        next_step="load an older checkpoint and report this one",
    )


@dataclass(frozen=True)
class Part:
    """One item of one file: `size` bytes of a shard (or value), from the shard's byte `start` on."""

    file: str
    item: int
    start: int
    size: int


@dataclass(frozen=True)
class Shard:
    """A box of a tensor: where it begins, how large it is (in elements), which parts hold its bytes, in order."""

    offset: tuple[int, ...]
    sizes: tuple[int, ...]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class TensorRow:
    """A whole tensor: dtype by name, size in elements, and its shards."""

    dtype: str
    size: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class Layout:
    """All of a checkpoint: `tensors` by name, `values` by name (each one whole part)."""

    tensors: Mapping[str, TensorRow]
    values: Mapping[str, Part]

    def parts(self) -> Iterator[Part]:
        """Yield every part once."""
        for row in self.tensors.values():
            for shard in row.shards:
                yield from shard.parts
        yield from self.values.values()

    def files(self) -> list[str]:
        """Return the names of the files that hold parts, each once, in the order in which they were written."""
        return list(dict.fromkeys(p.file for p in self.parts()))

    def encode(self) -> bytes:
        """Return the JSON bytes."""
        files = self.files()
        number = {name: n for n, name in enumerate(files)}

        def rows(parts: tuple[Part, ...]) -> list[list[int]]:
            return [[number[p.file], p.item, p.start, p.size] for p in parts]

        return json.dumps({
            "format": FORMAT, "files": files,
            "tensors": [
                [name, row.dtype, row.size, [[s.offset, s.sizes, rows(s.parts)] for s in row.shards]]
                for name, row in self.tensors.items()
            ],
            "values": [[name, rows((part,))] for name, part in self.values.items()],
        }, separators=(",", ":"), allow_nan=False).encode()


def decode(data: bytes) -> Layout:
    """Parse `Layout.encode` and check that it is whole; `data` was authenticated before.

    Raises Untrusted (``untrusted.layout``): a field of another kind, a box outside its tensor, elements that no
    shard holds, bytes that no part holds, one item used twice.
    """
    if len(data) > MAX_BYTES:
        raise broken("it is too large")
    try:
        value = json.loads(data, parse_float=_no_float, parse_constant=_no_float)
    except (ValueError, RecursionError):
        raise broken("it is not JSON") from None
    try:
        found = _layout(value)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, Malformed):
        raise broken("a field has another form") from None
    used = [(p.file, p.item) for p in found.parts()]
    if len(set(used)) != len(used):
        raise broken("one item serves two places")
    return found


def _no_float(_: str) -> Any:
    raise ValueError


def _layout(value: dict[str, Any]) -> Layout:
    if set(value) != {"format", "files", "tensors", "values"} or value["format"] != FORMAT:
        raise broken(f"it is not {FORMAT}")
    files = [file_name(name) for name in value["files"]]
    if len(set(files)) != len(files) or {METADATA, ASSETS} & set(files):
        raise broken("its files are not distinct")
    tensors = {_name(row[0]): _tensor(row, files) for row in value["tensors"]}
    values = {_name(row[0]): _value_part(row, files) for row in value["values"]}
    if len({**tensors, **values}) != len(value["tensors"]) + len(value["values"]):
        raise broken("a name occurs twice")
    return Layout(tensors, values)


def _name(value: object) -> str:
    if not isinstance(value, str):
        raise broken("a name is no text")
    return value


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MAX_INT:
        raise broken("a number is not whole")
    return value


def _numbers(value: list[object]) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise broken("a size is no list")
    return tuple(_whole(n) for n in value)


def _parts(rows: list[list[object]], files: list[str], total: int) -> tuple[Part, ...]:
    """Return parts that follow on each other from byte 0 to `total`."""
    found, at = [], 0
    for row in rows:
        file, item, start, size = _numbers(row)
        if start != at:
            raise broken("the parts of a shard leave a gap")
        found.append(Part(files[file], item, start, size))
        at += size
    if at != total or not found:
        raise broken("the parts of a shard are not all of it")
    return tuple(found)


def _tensor(row: list[Any], files: list[str]) -> TensorRow:
    _, dtype, raw_size, raw_shards = row
    size, width = _numbers(raw_size), DTYPES[dtype]
    shards = []
    for offset, sizes, parts in raw_shards:
        first, extent = _numbers(offset), _numbers(sizes)
        if not len(first) == len(extent) == len(size):
            raise broken("a shard has other dimensions than its tensor")
        if any(f + e > s for f, e, s in zip(first, extent, size, strict=True)):
            raise broken("a shard reaches past its tensor")
        shards.append(Shard(first, extent, _parts(parts, files, math.prod(extent) * width)))
    if len({s.offset for s in shards}) != len(shards):
        raise broken("two shards begin at one place")
    if sum(math.prod(s.sizes) for s in shards) != math.prod(size) or not _apart(shards, size):
        raise broken("the shards of a tensor are not all of it")
    return TensorRow(dtype, size, tuple(shards))


def _apart(shards: list[Shard], size: tuple[int, ...]) -> bool:
    """Return whether no two shards overlap; with the right sum of elements they then are the whole tensor."""
    full = [s for s in shards if math.prod(s.sizes)]
    rows = sorted(full, key=lambda s: s.offset)
    if all(s.sizes[1:] == size[1:] for s in rows):  # cut along the first dimension alone: the usual case
        return all(a.offset[0] + a.sizes[0] <= b.offset[0] for a, b in itertools.pairwise(rows))
    return not any(
        all(p < q + m and q < p + n for p, n, q, m in zip(a.offset, a.sizes, b.offset, b.sizes, strict=True))
        for a, b in itertools.combinations(full, 2)
    )


def _value_part(row: list[Any], files: list[str]) -> Part:
    _, parts = row
    (part,) = _parts(parts, files, _whole(parts[0][3]))
    return part


def encode_value(name: str, value: object) -> bytes:
    """Return the bytes of a value that is no tensor.

    Args: `name` for the refusal; `value` of None, bool, int, float, str, bytes, list, tuple and dict, exactly these
    types. Raises Malformed (``malformed.state``) with the name, never with the value.
    """
    try:
        return json.dumps(_mark(value, 0), separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        kind = error.args[0] if type(error) is TypeError and error.args else type(value).__name__
        raise Malformed(
            f"{name!r} holds a {kind}, which a checkpoint does not keep", code="state",
            next_step="keep tensors, numbers, text, bytes, lists, tuples and dicts of these; state_dict() of the rest",
        ) from None


def _mark(value: Any, depth: int) -> Any:
    """Return JSON in which a tuple, bytes, a float that JSON lacks and every dict carries its kind."""
    kind = type(value)
    if value is None or kind is bool or kind is int or kind is str:
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if depth >= MAX_DEPTH:
        raise TypeError("value nested too deeply")
    if kind is list:
        return [_mark(v, depth + 1) for v in value]
    if kind is tuple:
        return {"tuple": [_mark(v, depth + 1) for v in value]}
    if kind is dict:
        return {"map": [[_mark(k, depth + 1), _mark(v, depth + 1)] for k, v in value.items()]}
    raise TypeError(kind.__name__)


def decode_value(data: bytes) -> Any:
    """Return the value that `encode_value` wrote; raises Untrusted (``untrusted.layout``)."""
    try:
        return _unmark(json.loads(data, parse_constant=_no_float))
    except (ValueError, TypeError, RecursionError, binascii.Error):
        raise broken("a value has another form") from None


def _unmark(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmark(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inside),) = value.items()
    if kind == "tuple":
        return tuple(_unmark(v) for v in inside)
    if kind == "bytes":
        return base64.b64decode(inside, validate=True)
    if kind == "float" and inside in ("nan", "inf", "-inf"):
        return float(inside)
    if kind == "map":
        return {_unmark(k): _unmark(v) for k, v in inside}
    raise ValueError
