"""The frozen values of interlock/: canonical bytes, signed values, calls, orders, permits, events, errors, keys."""

import copy
import dataclasses
import inspect
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from interlock import errors, signed
from interlock.call import Action, Call, Decision, Effect, Kind, Resource, Subject, new_id
from interlock.canon import canonical, digest, parse
from interlock.errors import Conflict, Halted, Malformed, Refusal, Stopped, Unavailable, Untrusted
from interlock.event import Event, EventType, new_event_id
from interlock.keyfile import read_ed25519, read_private, write_ed25519, write_private
from interlock.order import Dataset, Labels, Lease, Plan, Scope
from interlock.permit import MAX_LIFE_MS, Permit, boottime_ms, issue, unseal
from interlock.signed import STOP, Signed, add_signature, key_id, public_from_text, public_text, sign, verify
from interlock.tier import PROFILES, Tier, at_least, highest, tier_of
from tests.vectors.make import LAUNCH, RESUME, STOP_ORDER

quick = settings(max_examples=150, deadline=None, derandomize=True)
keys_ = st.from_regex(r"[a-z0-9_.:/@-]{1,12}", fullmatch=True)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys_, inner, max_size=4), max_leaves=12,
)


# ---- canonical bytes -------------------------------------------------------------------------------

@quick
@given(plain)
def test_canonical_equals_rfc8785(value: Any) -> None:
    data = canonical(value)
    assert data == rfc8785.dumps(value)
    assert parse(data) == value
    assert digest(value).startswith("sha256:")


@pytest.mark.parametrize("value", [
    1.0, float("nan"), b"x", 2**53, -(2**53), "\ud800", {"Upper": 1}, {"": 1}, {"a b": 1}, {1: 2}, {"é": 1}, object(),
    {"a": [{"b": 0.5}]}, {1, 2}, {"x" * 129: 1}, {"a\n": 1},
])
def test_refuses_when_value_has_no_canonical_form(value: Any) -> None:
    with pytest.raises(Malformed):
        canonical(value)
    assert canonical({"a": [1, None, True, "é"]}) == '{"a":[1,null,true,"é"]}'.encode()


def test_refuses_when_value_is_too_deep() -> None:
    value: Any = 1
    for _ in range(16):
        value = [value]
    assert canonical(value)
    with pytest.raises(Malformed):
        canonical([value])


@pytest.mark.parametrize("data", [
    b"", b" {}", b"{} ", b'{"a": 1}', b'{"b":1,"a":2}', b'{"a":1,"a":1}', b"1.0", b"1e3", b"NaN", b"Infinity", b"-0",
    b'{"a":\xff}', b"\xef\xbb\xbf{}", b'"\\u0061"', b'"\\ud800"', b"[1,]", b"[" * 5000, b"01", b'{"A":1}',
    b"9007199254740992",
])
def test_refuses_when_bytes_are_not_canonical(data: bytes) -> None:
    with pytest.raises(Malformed):
        parse(data)
    assert parse(b'{"a":1}') == {"a": 1}


def test_refuses_when_bytes_are_too_many() -> None:
    with pytest.raises(Malformed):
        parse(b'"aaaa"', limit=5)
    assert parse(b'"aaa"', limit=5) == "aaa"


@quick
@given(st.binary(max_size=60) | plain.map(lambda v: json.dumps(v).encode()))
def test_what_parses_is_what_would_be_written(data: bytes) -> None:
    try:
        value = parse(data)
    except Malformed:
        return
    assert canonical(value) == data


# ---- signed values ---------------------------------------------------------------------------------

ADA, BEN, EVE = (Ed25519PrivateKey.generate() for _ in range(3))
PINNED = {key_id(k.public_key()): k.public_key() for k in (ADA, BEN)}


def test_two_different_keys_make_two() -> None:
    once = sign(STOP, {"a": 1}, ADA)
    twice = add_signature(once, BEN)
    assert verify(twice, STOP, PINNED, threshold=2) == {"a": 1}
    assert verify(Signed.from_json(twice.as_json()), STOP, PINNED) == {"a": 1}
    assert signed.signers(twice, PINNED) == frozenset(PINNED)
    for short in (once, add_signature(once, ADA), add_signature(once, EVE)):
        with pytest.raises(Untrusted):
            verify(short, STOP, PINNED, threshold=2)


def test_refuses_when_threshold_is_zero() -> None:
    with pytest.raises(Untrusted):
        verify(sign(STOP, {}, EVE), STOP, PINNED, threshold=0)


@quick
@given(st.data())
def test_any_changed_byte_is_refused(data: st.DataObject) -> None:
    good = sign(STOP, {"a": "text", "b": [1, 2]}, ADA)
    where = data.draw(st.integers(0, len(good.payload) - 1))
    payload = bytearray(good.payload)
    payload[where] ^= data.draw(st.integers(1, 255))
    with pytest.raises(Refusal):
        verify(Signed(STOP, bytes(payload), good.signatures), STOP, PINNED)
    assert verify(good, STOP, PINNED)


@pytest.mark.parametrize("value", [
    None, [], {}, {"format": STOP}, {"format": "x", "payload": "", "signatures": []},
    {"format": STOP, "payload": "", "signatures": []},
    {"format": STOP, "payload": "!", "signatures": [{"key": "a", "sig": ""}]},
    {"format": STOP, "payload": "", "signatures": [{"key": "a"}]}, {"format": STOP, "payload": "", "signatures": [1]},
    {"format": STOP, "payload": "", "signatures": [{"key": "a", "sig": ""}] * 17},
    {"format": STOP, "payload": 1, "signatures": [{"key": "a", "sig": ""}]},
    {"format": STOP, "payload": "", "signatures": [{"key": "a", "sig": ""}], "more": 1},
])
def test_refuses_when_signed_value_is_odd(value: object) -> None:
    with pytest.raises(Malformed):
        Signed.from_json(value)
    assert Signed.from_json(sign(STOP, {}, ADA).as_json())


def test_public_keys_round_trip() -> None:
    assert key_id(public_from_text(public_text(ADA.public_key()))) in PINNED
    for odd in ("", "AAAA", "no base64!"):
        with pytest.raises(Malformed):
            public_from_text(odd)
    with pytest.raises(Malformed):
        sign("interlock/unknown/v1", {}, ADA)


# ---- calls -----------------------------------------------------------------------------------------

CALL = Call(Action.LAUNCH, Subject("per_1", "demo", "person", "per_1"), Resource("pool", "default", "demo", Tier.HIGH),
            "run_1", "sha256:x", "127.0.0.1")


def test_call_round_trips_and_has_a_digest_of_every_field() -> None:
    assert Call.from_json(parse(canonical(CALL.as_json()))) == CALL
    for change in ({"run": "run_2"}, {"bound": "sha256:y"}, {"action": Action.LOAD}, {"id": "call_0"},
                   {"subject": Subject("per_2", "demo")}, {"resource": Resource("pool", "default", "demo")}):
        assert dataclasses.replace(CALL, **change).digest() != CALL.digest()  # type: ignore[arg-type]


@pytest.mark.parametrize("change", [
    {"action": "lunch"}, {"action": None}, {"subject": None}, {"resource": []}, {"run": None}, {"bound": 1}, {"id": ""},
    {"subject": {"id": "", "tenant": "t", "kind": "person", "person": ""}},
    {"resource": {"kind": "k", "name": "n", "tenant": "t", "tier": "medium", "ancestors": []}},
    {"resource": {"kind": "k", "name": "n", "tenant": "t", "tier": "none", "ancestors": [1]}},
    {"source_ip": "x" * 5000},
])
def test_refuses_when_call_is_odd(change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        Call.from_json({**CALL.as_json(), **change})


def test_every_action_is_work_govern_or_stop() -> None:
    assert Action.STOP.kind is Kind.STOP
    assert [a for a in Action if a.kind is Kind.STOP] == [Action.STOP]
    work = {"infer", "launch", "continue", "restart", "read_data", "save", "load", "release_key", "call_tool",
            "export_weights", "serve", "infer_restricted"}
    assert {a.value for a in Action if a.kind is Kind.WORK} == work


def test_only_allow_allows() -> None:
    assert Decision(Effect.ALLOW, "allowed", "").allowed
    assert not Decision(Effect.DENY, "allowed", "").allowed
    assert canonical(Decision(Effect.DENY, "no_match", "no", ("policy.csv:1",), needs=2).as_json())
    assert new_id("run") != new_id("run")


def test_refuses_when_tier_is_unknown() -> None:
    for odd in ("", "medium", "HIGH", None, 1):
        with pytest.raises(Malformed) as caught:
            tier_of(odd)
        assert caught.value.code == "malformed.tier"
    assert [tier_of(t) for t in ("none", "high", "critical")] == list(Tier)
    assert set(PROFILES) == set(Tier)


def test_tiers_have_an_order() -> None:
    none, high, critical = Tier.NONE, Tier.HIGH, Tier.CRITICAL
    assert [highest(*t) for t in ((none,), (high, none), (none, critical, high))] == [none, high, critical]
    assert [[at_least(tier, floor) for floor in (none, high, critical)] for tier in (none, high, critical)] == [
        [True, False, False], [True, True, False], [True, True, True]]


def test_tiers_only_get_stricter() -> None:
    none, high, critical = (PROFILES[t] for t in Tier)
    assert none.lease_ms > high.lease_ms > critical.lease_ms
    assert none.absent_ms > high.absent_ms > critical.absent_ms
    assert none.launch_approvals <= high.launch_approvals < critical.launch_approvals


# ---- orders ----------------------------------------------------------------------------------------

LABELS = Labels("demo", "svc_1", "per_1", "run_1", "node-1", Tier.NONE, "tuned", ("base", "older"))


@pytest.mark.parametrize(("scope", "covered"), [
    ("everything", True), ("tenant:demo", True), ("tenant:other", False), ("model:tuned", True), ("model:base", True),
    ("model:older", True), ("model:new", False), ("run:run_1", True), ("run:run_2", False), ("subject:svc_1", True),
    ("subject:per_1", True), ("subject:per_2", False), ("node:node-1", True), ("node:node-2", False),
])
def test_scopes_match_labels(scope: str, covered: bool) -> None:
    found = Scope.parse(scope)
    assert found.matches(LABELS) is covered
    assert str(found) == scope
    assert Scope.from_json(found.as_json()) == found


@pytest.mark.parametrize("words", ["", "all", "run", "run:", "everything:x", "planet:earth"])
def test_refuses_when_scope_is_odd(words: str) -> None:
    with pytest.raises(Malformed):
        Scope.parse(words)


@pytest.mark.parametrize(
    "value", [STOP_ORDER, RESUME, LAUNCH, LABELS, LAUNCH.plan, Lease("n", "run_1", 1, "node-1", 5, 0)]
)
def test_orders_round_trip(value: Any) -> None:
    assert type(value).from_json(parse(canonical(value.as_json()))) == value


@pytest.mark.parametrize(("kind", "change"), [
    (STOP_ORDER, {"scope": {"kind": "run", "id": ""}}), (STOP_ORDER, {"epoch": -1}),
    (STOP_ORDER, {"epoch": True}), (STOP_ORDER, {"id": ""}), (RESUME, {"clears": []}), (RESUME, {"clears": ["b", "a"]}),
    (RESUME, {"clears": ["a", "a"]}), (RESUME, {"approvals": [1]}), (LAUNCH, {"facts": None}),
    (LAUNCH, {"run": "run_2"}), (LAUNCH, {"attempt": 0}), (LAUNCH, {"lease_ms": 0}),
    (LABELS, {"tier": "medium"}), (LABELS, {"lineage": "base"}),
])
def test_refuses_when_order_is_odd(kind: Any, change: dict[str, Any]) -> None:
    with pytest.raises(Malformed):
        type(kind).from_json({**kind.as_json(), **change})


@pytest.mark.parametrize("change", [
    {"argv": []}, {"argv": [""]}, {"argv": "ls"}, {"argv": ["a\0b"]}, {"argv": ["x" * 70_000]},
    {"unknown": 1}, {"tier": "medium"}, {"guest": 1},
    {"valid_s": 8 * 86400}, {"restarts": 101}, {"replicas": 2}, {"code": [{"name": "../x", "digest": "d"}]},
    {"code": [{"name": ".x", "digest": "d"}]}, {"code": [{"name": "a\n", "digest": "d"}]},
    {"datasets": [{"name": "d", "path": "/x\0"}]},
    {"code": [{"name": "a", "digest": "d"}, {"name": "a", "digest": "e"}]}, {"code": [{"name": "a"}]},
    {"datasets": [{"name": "d", "path": "relative"}]}, {"datasets": [{"name": "a/b", "path": "/x"}]}, {"tenant": ""},
])
def test_refuses_when_plan_is_odd(change: dict[str, Any]) -> None:
    smallest = {"argv": ["true"], "tier": "none", "tenant": "demo"}
    with pytest.raises(Malformed):
        Plan.from_json({**smallest, **change})
    assert Plan.from_json(smallest).pids == 256


def test_a_plan_digest_covers_every_field() -> None:
    plan = Plan(("true",), Tier.NONE, "demo")
    changes: dict[str, Any] = {
        "argv": ("false",), "tier": Tier.HIGH, "tenant": "other", "code": (("a", "d"),),
        "datasets": (Dataset("d", "/x"),), "model": "m", "pool": "p", "replicas": 2, "restarts": 1, "pids": 1,
        "memory_mb": 1, "cpu_seconds": 1, "work_mb": 1, "output_mb": 1, "guest": True, "valid_s": 1, "ranks": 2,
        "environment": "guest", "checkpoints": True, "weights": ("w",), "serve": True, "resume": True,
    }
    assert set(changes) == {f.name for f in dataclasses.fields(Plan)}
    assert len({dataclasses.replace(plan, **{k: v}).digest() for k, v in changes.items()} | {plan.digest()}) == 23


# ---- permits ---------------------------------------------------------------------------------------

KEY = b"k" * 32


def _permit(**change: Any) -> Permit:
    fields: dict[str, Any] = {"call": "sha256:x", "action": Action.LAUNCH, "resource": "pool/default", "run": "run_1",
                              "expires_ms": boottime_ms() + MAX_LIFE_MS, "epoch": 3, "record": "r"}
    return issue(**{**fields, **change})


def test_refuses_when_a_permit_is_made_by_hand() -> None:
    good = _permit()
    fields = {f.name: getattr(good, f.name) for f in dataclasses.fields(Permit)}
    for forge in (
        lambda: Permit("sha256:x", Action.LAUNCH, "pool/default", "", 1, 0, "r"),
        lambda: Permit(**{**fields, "issuer": object()}),
        lambda: Permit(**{**fields, "issuer": None}),
        lambda: copy.copy(good), lambda: copy.deepcopy(good), lambda: pickle.dumps(good),
    ):
        with pytest.raises(TypeError):
            forge()
    with pytest.raises(dataclasses.FrozenInstanceError):
        good.epoch = 4  # type: ignore[misc]
    assert good.seal(KEY)


@pytest.mark.parametrize(("check", "error"), [
    ({"action": Action.LOAD}, Untrusted), ({"resource": "pool/other"}, Untrusted), ({"epoch": 4}, Halted),
    ({"epoch": 2}, Halted), ({"now_ms": 2**52}, Untrusted),
])
def test_refuses_when_a_permit_does_not_fit(check: dict[str, Any], error: type[Refusal]) -> None:
    right: dict[str, Any] = {"action": Action.LAUNCH, "resource": "pool/default", "epoch": 3}
    with pytest.raises(error):
        _permit().check(**{**right, **check})
    _permit().check(**right)


def test_a_sealed_permit_crosses_a_process_and_nothing_else_does() -> None:
    good = _permit()
    assert unseal(good.seal(KEY), KEY) == good
    for seal, key in ((good.seal(KEY), b"j" * 32), (good.seal(KEY)[:-4] + "AAAA", KEY), ("", KEY), ("é", KEY)):
        with pytest.raises(Untrusted):
            unseal(seal, key)
    with pytest.raises(Untrusted):
        unseal(good.seal(KEY), b"")
    with pytest.raises(Malformed):
        unseal("a", KEY)


# ---- events, errors, key files ---------------------------------------------------------------------

def test_an_event_leaves_out_what_is_absent() -> None:
    event = Event(EventType.STARTED, "system")
    assert set(event.as_json()) == {"v", "id", "type", "actor", "occurred_us"}
    assert parse(event.canonical()) == event.as_json()
    with pytest.raises(Malformed):
        Event(EventType.STARTED, "system", facts={"loss": 0.5}).canonical()


def test_event_names_are_unique_and_ids_sort_by_time() -> None:
    assert len({t.value for t in EventType}) == len(list(EventType))
    assert all(t.value.count(".") == 1 for t in EventType)
    ids = [new_event_id() for _ in range(50)]
    assert len(set(ids)) == 50
    assert {i[12] for i in ids} == {"7"}
    assert sorted(i[:12] for i in ids) == [i[:12] for i in ids]


@pytest.mark.parametrize("cls", list(errors.CLASSES.values()))
def test_errors_travel(cls: type[Refusal]) -> None:
    found = errors.from_json(cls("words", code="fine", next_step="do this", details={"a": 1}).as_json())
    assert type(found) is cls
    assert (found.code, found.next_step, found.details) == (f"{cls.default_code}.fine", "do this", {"a": 1})
    assert errors.from_json(cls("words").as_json()).code == cls.default_code
    assert cls.__doc__
    assert cls.http_status >= 400
    assert "do this" in str(found)


def test_every_class_of_the_tree_is_listed_and_stopped_is_no_exception() -> None:
    defined = {c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, Refusal) and c is not Refusal}
    assert set(errors.CLASSES.values()) == defined
    assert not issubclass(Stopped, Exception)
    assert type(errors.from_json({"code": "strange"})) is Refusal
    assert errors.from_json({}).code == "refused"


def test_a_private_key_stays_private(tmp_path: Path) -> None:
    path = tmp_path / "k"
    write_ed25519(path, ADA)
    assert path.stat().st_mode & 0o777 == 0o600
    assert key_id(read_ed25519(path).public_key()) == key_id(ADA.public_key())
    with pytest.raises(Conflict):
        write_ed25519(path, BEN)


def _loose(path: Path) -> None:
    path.chmod(0o640)


def _short(path: Path) -> None:
    path.write_bytes(b"short")


def _linked(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


def _gone(path: Path) -> None:
    path.unlink()


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(("spoil", "error"), [
    (_loose, Untrusted), (_short, Malformed), (_linked, Unavailable), (_gone, Unavailable), (_folder, Untrusted),
    (_pipe, Untrusted),
])
def test_refuses_when_key_file_is_spoilt(spoil: Callable[[Path], None], error: type[Refusal], tmp_path: Path) -> None:
    path = tmp_path / "k"
    write_private(path, os.urandom(32))
    assert len(read_private(path)) == 32
    spoil(path)
    with pytest.raises(error) as caught:
        read_ed25519(path)
    assert caught.value.code.split(".")[0] == error.default_code
