"""Manifests of checkpoints: vectors, and the three ways to read one."""

import base64
import dataclasses
import hmac
import json
from typing import Any

import pytest

from interlock import manifest
from interlock.canon import canonical, digest
from interlock.errors import Malformed, Refusal, Untrusted
from tests.vectors import make_sealed

KEY = make_sealed.RUN_KEY
GOOD = make_sealed.good_manifest()
CASES: list[dict[str, Any]] = json.loads((make_sealed.HERE / "manifest.json").read_text())


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_manifest_vector(case: dict[str, Any]) -> None:
    stored, key = case["stored"].encode(), bytes.fromhex(case["run_key"])
    if case["expect"] == "ok":
        found = manifest.verify(stored, key)
        assert (found, found.digest()) == (GOOD, case["digest"])
        return
    with pytest.raises(Refusal) as caught:
        manifest.verify(stored, key)
    assert caught.value.code == case["expect"]


def test_three_ways_to_read_agree_on_a_good_one() -> None:
    data = GOOD.seal(KEY)
    assert manifest.read(data) == manifest.verify(data, KEY) == manifest.verify_digest(data, GOOD.digest()) == GOOD
    assert GOOD.digest() == digest(GOOD.body())


def test_refuses_when_the_digest_is_another() -> None:
    data = GOOD.seal(KEY)
    with pytest.raises(Untrusted) as caught:
        manifest.verify_digest(data, "sha256:" + "0" * 64)
    assert caught.value.code == "untrusted.digest"
    edited = data.replace(b'"size":300', b'"size":301')
    with pytest.raises(Untrusted):
        manifest.verify_digest(edited, GOOD.digest())
    assert manifest.read(edited).files[0].size == 301  # `read` trusts nothing and says so
    assert manifest.verify_digest(data, GOOD.digest()) == GOOD


def test_the_digest_does_not_depend_on_the_key_or_on_the_order_of_files() -> None:
    other = dataclasses.replace(GOOD, files=GOOD.files[::-1])
    assert other.digest() == GOOD.digest()
    assert other.seal(KEY) == GOOD.seal(KEY) != GOOD.seal(bytes(32))


def test_the_mac_key_is_not_the_run_key() -> None:
    """A MAC directly under the run key would let one key serve two purposes."""
    mac = hmac.digest(KEY, canonical(GOOD.body()), "sha256")
    forged = canonical({"body": GOOD.body(), "mac": base64.b64encode(mac).decode()})
    with pytest.raises(Untrusted):
        manifest.verify(forged, KEY)
    assert manifest.verify(GOOD.seal(KEY), KEY) == GOOD


@pytest.mark.parametrize("count", [1, 128, 129])
def test_refuses_when_it_lists_more_than_128_files(count: int) -> None:
    rows = tuple(dataclasses.replace(GOOD.files[0], name=f"f{i:03d}.sealed") for i in range(count))

    def make() -> manifest.Manifest:
        return dataclasses.replace(GOOD, files=rows, assets={})

    if count <= 128:
        assert manifest.verify(make().seal(KEY), KEY).files == rows
    else:
        with pytest.raises(Malformed):
            make()


@pytest.mark.parametrize(("kind", "size", "good"), [
    ("weights", 100_000_000, True), ("weights", 100_000_001, False), ("state", 100_000_001, True),
])
def test_files_of_weights_are_at_most_100_mb(kind: str, size: int, good: bool) -> None:
    rows = (dataclasses.replace(GOOD.files[0], size=size),)
    try:
        dataclasses.replace(GOOD, kind=kind, files=rows, assets={})
        found = True
    except Malformed:
        found = False
    assert found is good


def test_refuses_when_names_are_off() -> None:
    assert manifest.file_name("r0-0.sealed") == "r0-0.sealed"
    assert manifest.asset_name("tokenizer_config.json") == "tokenizer_config.json"
    for name in ("", ".sealed", "..sealed", "../x.sealed", "x.sealed/", "X.sealed", "x.sealed\n", "é.sealed", 5, None):
        with pytest.raises(Malformed) as caught:
            manifest.file_name(name)
        assert caught.value.code == "malformed.file_name"
    for name in ("", ".", "..", "a/b", "A", "a\n", b"a"):
        with pytest.raises(Malformed) as caught:
            manifest.asset_name(name)
        assert caught.value.code == "malformed.asset_name"


def test_refuses_when_the_run_key_has_another_length() -> None:
    data = GOOD.seal(KEY)
    for key in (b"", bytes(16), bytes(33)):
        with pytest.raises(Malformed):
            manifest.verify(data, key)
        with pytest.raises(Malformed):
            GOOD.seal(key)
    assert manifest.verify(data, KEY) == GOOD


def test_refuses_when_it_is_too_large() -> None:
    data = GOOD.seal(KEY)
    with pytest.raises(Malformed) as caught:
        manifest.read(data + b" " * manifest.MAX_BYTES)
    assert caught.value.code == "malformed.manifest"
    assert manifest.read(data) == GOOD
