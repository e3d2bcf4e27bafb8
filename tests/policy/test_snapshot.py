"""Signed entitlements: bound to one question, none for the disabled."""

from typing import Any

import pytest

from interlock.errors import Malformed, Untrusted
from interlock.signed import SNAPSHOT, STOPS, key_id, sign
from interlock.tier import Tier
from policy import snapshot
from tests.policy.conftest import Signers

BODY: dict[str, Any] = {
    "nonce": "n1", "bundle_version": 4, "epoch": 2, "disabled": ["per_2"],
    "roles": [{"person": "per_1", "tenant": "demo", "role": "researcher"},
              {"person": "per_2", "tenant": "demo", "role": "on_call"}],
    "programmes": [{"person": "per_1", "programme": "vetted"}, {"person": "per_2", "programme": "vetted"}],
    "keys": [{"id": "key_1", "hash": "sha256:aa", "person": "per_1", "tenant": "demo", "scopes": ["infer", "look"]},
             {"id": "key_2", "hash": "sha256:bb", "person": "per_2", "tenant": "demo", "scopes": ["infer"]}],
    "models": [{"name": "aurora", "tenant": "demo", "tier": "critical", "version": "sha256:cc", "state": "serving",
                "lineage": ["base"]}],
}
ROW, MODEL = BODY["keys"][0], BODY["models"][0]


def _verify(signers: Signers, body: dict[str, Any], nonce: str = "n1", format_: str = SNAPSHOT) -> snapshot.Snapshot:
    keys = {key_id(signers.ada.public_key()): signers.ada.public_key()}
    return snapshot.verify(sign(format_, body, signers.ada), keys, nonce)


def test_tells_roles_and_programmes(signers: Signers) -> None:
    found = _verify(signers, BODY)
    assert found.roles_of("per_1", "demo") == {"researcher"}
    assert found.roles_of("per_1", "other") == frozenset()
    assert found.programmes_of("per_1") == {"vetted"}
    assert (found.bundle_version, found.epoch) == (4, 2)


def test_a_disabled_person_has_nothing(signers: Signers) -> None:
    found = _verify(signers, BODY)
    assert found.roles_of("per_2", "demo") == frozenset()
    assert found.programmes_of("per_2") == frozenset()
    assert set(found.keys) == {"key_1"}


def test_tells_keys_and_models(signers: Signers) -> None:
    found = _verify(signers, BODY)
    key, model = found.keys["key_1"], found.model("aurora")
    assert (key.hash, key.person, key.tenant, key.scopes) == ("sha256:aa", "per_1", "demo", {"infer", "look"})
    assert model == snapshot.ModelRow("aurora", "demo", Tier.CRITICAL, "sha256:cc", "serving", ("base",))
    assert found.models == (model,)
    assert found.model("other") is None
    with pytest.raises(TypeError):
        found.keys["key_3"] = key  # type: ignore[index]


@pytest.mark.parametrize("nonce", ["n2", "", "N1"])
def test_refuses_when_snapshot_answers_another_question(nonce: str, signers: Signers) -> None:
    with pytest.raises(Untrusted) as caught:
        _verify(signers, BODY, nonce)
    assert caught.value.code == "untrusted.nonce"
    assert _verify(signers, BODY)


def test_refuses_when_signature_is_not_by_a_grant_key(signers: Signers) -> None:
    keys = {key_id(signers.ben.public_key()): signers.ben.public_key()}
    with pytest.raises(Untrusted):
        snapshot.verify(sign(SNAPSHOT, BODY, signers.ada), keys, "n1")
    with pytest.raises(Untrusted):
        _verify(signers, BODY, format_=STOPS)
    assert snapshot.verify(sign(SNAPSHOT, BODY, signers.ben), keys, "n1")


@pytest.mark.parametrize("change", [
    {"extra": 1}, {"roles": {}}, {"roles": [{"person": "x"}]}, {"programmes": [1]}, {"disabled": "per_1"},
    {"epoch": -1}, {"roles": [{"person": "", "tenant": "t", "role": "r"}]},
    {"keys": None}, {"keys": [{**ROW, "secret": "x"}]}, {"keys": [ROW, ROW]}, {"keys": [{**ROW, "scopes": "infer"}]},
    {"keys": [{**ROW, "hash": ""}]}, {"models": [{**MODEL, "tier": "low"}]}, {"models": [MODEL, MODEL]},
    {"models": [{**MODEL, "state": "draft"}]}, {"models": [{**MODEL, "state": "retired"}]},
    {"models": [{**MODEL, "lineage": ["m"] * 1025}]}, {"models": [{**MODEL, "owner": "per_1"}]},
])
def test_refuses_when_fields_are_odd(change: dict[str, Any], signers: Signers) -> None:
    with pytest.raises(Malformed):
        _verify(signers, {**BODY, **change})
    assert _verify(signers, BODY)


@pytest.mark.parametrize(("name", "limit"), [("roles", "MAX_ROWS"), ("keys", "MAX_ROWS"), ("models", "MAX_MODELS")])
def test_refuses_when_there_are_more_rows_than_the_limit(
    name: str, limit: str, signers: Signers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = len(BODY[name])
    monkeypatch.setattr(snapshot, limit, rows - 1)
    monkeypatch.setattr(snapshot._rows, "__defaults__", (snapshot.MAX_ROWS,))
    with pytest.raises(Malformed):
        _verify(signers, BODY)
    monkeypatch.setattr(snapshot, limit, rows + 2)
    monkeypatch.setattr(snapshot._rows, "__defaults__", (snapshot.MAX_ROWS,))
    assert _verify(signers, BODY)
