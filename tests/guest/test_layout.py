"""The description of a checkpoint: whole or refused. No torch, so that each fault is one line."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock.errors import Malformed, Untrusted
from interlock.layout import FORMAT, Layout, Part, Shard, TensorRow, decode, decode_value, encode_value


def _good() -> dict[str, Any]:
    """A tensor of 4 × 2 bytes in two shards, the second one in two files, and a value."""
    return {
        "format": FORMAT, "files": ["r0-0.sealed", "r1-0.sealed", "r1-1.sealed"],
        "tensors": [["w", "uint8", [4, 2], [
            [[0, 0], [1, 2], [[0, 0, 0, 2]]],
            [[1, 0], [3, 2], [[1, 0, 0, 4], [2, 0, 4, 2]]],
        ]]],
        "values": [["n", [[0, 1, 0, 7]]]],
    }


def test_a_layout_reads_and_survives_its_own_encoding() -> None:
    found = decode(json.dumps(_good()).encode())
    assert found == Layout(
        {"w": TensorRow("uint8", (4, 2), (
            Shard((0, 0), (1, 2), (Part("r0-0.sealed", 0, 0, 2),)),
            Shard((1, 0), (3, 2), (Part("r1-0.sealed", 0, 0, 4), Part("r1-1.sealed", 0, 4, 2))),
        ))},
        {"n": Part("r0-0.sealed", 1, 0, 7)},
    )
    assert decode(found.encode()) == found
    assert found.files() == ["r0-0.sealed", "r1-0.sealed", "r1-1.sealed"]
    assert decode(Layout({}, {}).encode()) == Layout({}, {})


def _set(path: tuple[Any, ...], value: Any) -> Any:
    def change(whole: dict[str, Any]) -> None:
        at: Any = whole
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value
    return change


_SHARDS = ("tensors", 0, 3)
FAULTS = {
    "another format": _set(("format",), "interlock/checkpoint/v2"),
    "a further field": _set(("more",), 1),
    "a file that is a path": _set(("files", 0), "../r0-0.sealed"),
    "a file twice": _set(("files", 1), "r0-0.sealed"),
    "its own file": _set(("files", 1), "metadata.sealed"),
    "no list of files": _set(("files",), {"r0-0.sealed": 1}),
    "an unknown dtype": _set(("tensors", 0, 1), "object"),
    "a dtype that is an attribute": _set(("tensors", 0, 1), "__class__"),
    "a negative size": _set(("tensors", 0, 2, 0), -4),
    "a size that is true": _set((*_SHARDS, 0, 1, 0), True),
    "a size that is a text": _set(("tensors", 0, 2), "42"),
    "other dimensions": _set((*_SHARDS, 0, 1), [1, 2, 1]),
    "a shard past the end": _set((*_SHARDS, 1, 0), [2, 0]),
    "a shard missing": _set(_SHARDS, [_good()["tensors"][0][3][0]]),
    "no shards": _set(_SHARDS, []),
    "two shards at one place": _set((*_SHARDS, 1, 0), [0, 0]),
    "two shards that overlap": _set(_SHARDS, [
        [[0, 0], [2, 2], [[0, 0, 0, 4]]], [[1, 0], [2, 2], [[1, 0, 0, 4]]],
    ]),
    "two boxes that overlap": _set(_SHARDS, [
        [[0, 0], [3, 1], [[0, 0, 0, 3]]], [[2, 0], [1, 2], [[1, 0, 0, 2]]], [[0, 1], [3, 1], [[2, 0, 0, 3]]],
    ]),
    "a part missing": _set((*_SHARDS, 1, 2), [[1, 0, 0, 4]]),
    "no part": _set((*_SHARDS, 1, 2), []),
    "a gap between parts": _set((*_SHARDS, 1, 2, 1), [2, 0, 5, 1]),
    "parts that overlap": _set((*_SHARDS, 1, 2, 1), [2, 0, 3, 3]),
    "a file that is not listed": _set((*_SHARDS, 0, 2, 0, 0), 3),
    "a file counted from the end": _set((*_SHARDS, 0, 2, 0, 0), -1),
    "one item in two places": _set(("values", 0, 1, 0), [0, 0, 0, 2]),
    "a value in two parts": _set(("values", 0, 1), [[0, 1, 0, 7], [0, 2, 7, 1]]),
    "a name twice": _set(("values", 0, 0), "w"),
    "a name that is a number": _set(("values", 0, 0), 1),
    "a fraction": _set(("values", 0, 1, 0, 3), 7.0),
    "a huge number": _set(("values", 0, 1, 0, 3), 2**60),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_layout_with_a_fault_is_refused(fault: str) -> None:
    value = _good()
    decode(json.dumps(value).encode())
    FAULTS[fault](value)
    with pytest.raises(Untrusted) as refusal:
        decode(json.dumps(value).encode())
    assert refusal.value.code == "untrusted.layout"


@pytest.mark.parametrize("data", [
    b"", b"null", b"[]", b"{}", b"\x80\x04}.", b"[" * 100_000, b'{"format":NaN}', b"\xff\xfe", b'"text"',
])
def test_what_is_no_layout_is_refused(data: bytes) -> None:
    with pytest.raises(Untrusted):
        decode(data)


def test_a_layout_may_be_cut_in_both_dimensions() -> None:
    value = _good()
    value["tensors"][0][3] = [
        [[0, 0], [4, 1], [[0, 0, 0, 4]]], [[0, 1], [2, 1], [[1, 0, 0, 2]]], [[2, 1], [2, 1], [[2, 0, 0, 2]]],
    ]
    assert len(decode(json.dumps(value).encode()).tensors["w"].shards) == 3


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text() | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(_VALUES)
def test_values_come_back_as_they_were(value: object) -> None:
    found = decode_value(encode_value("x", value))
    assert repr(found) == repr(value)  # tells -0.0, 1 and True, tuple and list apart


def test_numbers_that_json_lacks() -> None:
    found = decode_value(encode_value("x", [math.nan, math.inf, -math.inf]))
    assert math.isnan(found[0])
    assert found[1:] == [math.inf, -math.inf]
    assert b"NaN" not in encode_value("x", math.nan)


@pytest.mark.parametrize("value", [
    object(), {1}, [{"a": open}], bytearray(b"x"), type("Own", (int,), {})(3),
    pytest.param(10**5000, id="huge"),
])
def test_a_value_that_is_not_data_is_refused_by_its_name(value: object) -> None:
    encode_value("fine", 3)
    with pytest.raises(Malformed) as refusal:
        encode_value("optimizer.state.0.x", [value])
    assert refusal.value.code == "malformed.state"
    assert "'optimizer.state.0.x'" in refusal.value.message


@pytest.mark.parametrize("data", [
    b"", b"NaN", b'{"tuple":[1],"map":[]}', b"{}", b'{"float":"1.5"}', b'{"bytes":"*"}', b'{"map":[[[1],2]]}',
    b'{"class":"os.system"}', b"[" * 100_000, b"\x80\x04}.",
])
def test_what_is_no_value_is_refused(data: bytes) -> None:
    assert decode_value(b'{"tuple":[1]}') == (1,)
    with pytest.raises(Untrusted):
        decode_value(data)
