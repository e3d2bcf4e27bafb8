"""The leaf's one-pass parser says exactly what the canonical parser says."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from audit import leaf
from interlock.canon import canonical, parse
from interlock.errors import Malformed
from tests.audit.conftest import step

KEYS = st.text(alphabet="abz09_.:/@-", min_size=1, max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_what_is_canonical_parses_alike(value: object) -> None:
    body = canonical(value)
    assert leaf._parse(body) == parse(body) == value


ODD = [
    b'{"a":1.5}', b'{"a":1e3}', b'{"a":NaN}', b'{"a":9007199254740992}', b'{"a":1,"a":1}', b'{"A":1}', b'{"a" :1}',
    b'{"b":1,"a":1}', b'{"a":"\\u0041"}', b'{"a":"\\ud800"}', b'{"a":-0}', b'{"":1}', b"\xff", b"", b'{"a":01}',
    b"[" * 18 + b"]" * 18, b"[" * 40000 + b"]" * 20, b'{"a\n":1}',
]


@pytest.mark.parametrize("body", ODD)
def test_refuses_when_bytes_are_not_canonical(body: bytes) -> None:
    with pytest.raises(Malformed):
        parse(body)
    with pytest.raises(Malformed):
        leaf._parse(body)
    leaf._parse(b'{"a":1}')


def test_refuses_when_a_record_has_odd_fields() -> None:
    good = leaf.encode("n1", "s", 0, leaf.GENESIS, step(1).canonical())
    found = leaf.decode(good)
    assert (found.node, found.stream, found.seq, found.event) == ("n1", "s", 0, step(1).as_json() | found.event)
    value = json.loads(good)
    for path, bad in [
        ("seq", -1), ("seq", "0"), ("seq", True), ("node", "a/b"), ("node", ""), ("stream", "x" * 97),
        ("prev", "sha256:0"), ("event", []), ("more", 1), ("event.v", 2), ("event.id", ""), ("event.type", 1),
        ("event.facts", []), ("event.occurred_us", -1), ("event.more", 1), ("event.run", "x" * 65),
    ]:
        spoilt = json.loads(json.dumps(value))
        inner, _, key = path.rpartition(".")
        (spoilt[inner] if inner else spoilt)[key] = bad
        with pytest.raises(Malformed):
            leaf.decode(canonical(spoilt))
