"""Which provider wraps for which tier."""

from typing import Any

import pytest

from interlock.errors import Conflict, Denied, Malformed
from interlock.tier import Tier
from kms.assignment import Assignment, read

TOKEN = {"module": "/usr/lib/m.so", "token": "cp", "pin_file": "/etc/pin"}


def test_without_words_none_is_local_and_the_rest_has_no_provider() -> None:
    for found in (Assignment(), read({})):
        assert found.provider(Tier.NONE) == "local"
        assert found.local_tiers() == {Tier.NONE}
        for tier in (Tier.HIGH, Tier.CRITICAL):
            with pytest.raises(Denied) as refused:
                found.provider(tier)
            assert refused.value.code == "denied.provider"
            assert "kms.pkcs11" in refused.value.next_step


def test_with_a_token_high_and_critical_go_there() -> None:
    found = read({"pkcs11": TOKEN})
    assert [found.provider(t) for t in Tier] == ["local", "pkcs11", "pkcs11"]


def test_high_is_local_when_the_settings_say_so() -> None:
    found = read({"tiers": {"high": "local"}})
    assert found.provider(Tier.HIGH) == "local"
    assert found.local_tiers() == {Tier.NONE, Tier.HIGH}


def test_refuses_when_critical_is_local() -> None:
    with pytest.raises(Conflict) as refused:
        read({"pkcs11": TOKEN, "tiers": {"critical": "local"}})
    assert refused.value.code == "conflict.kms_tier"
    assert read({"pkcs11": TOKEN, "tiers": {"critical": "pkcs11"}}).provider(Tier.CRITICAL) == "pkcs11"
    assert Tier.CRITICAL not in Assignment(dict.fromkeys(Tier, "local")).local_tiers()


@pytest.mark.parametrize("bad", [
    [], {"vault": {}}, {"tiers": {"high": "vault"}}, {"tiers": {"highest": "local"}}, {"tiers": []}, {"pkcs11": []},
    {"pkcs11": {**TOKEN, "pin": "1234"}}, {"pkcs11": {**TOKEN, "token": ""}}, {"pkcs11": {**TOKEN, "token": "x" * 33}},
    {"pkcs11": {**TOKEN, "module": "m.so"}}, {"pkcs11": {**TOKEN, "conf": "here"}},
    {"pkcs11": {"module": "/m.so", "token": "cp"}},
])
def test_refuses_when_the_settings_are_off(bad: Any) -> None:
    with pytest.raises(Malformed):
        read(bad)
    assert read({"pkcs11": {**TOKEN, "conf": "/etc/c"}}).pkcs11 is not None
