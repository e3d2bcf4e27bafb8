"""The PKCS#11 provider over SoftHSM: the contract, and what tokens bring with them."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pkcs11
import pytest
from pkcs11 import Attribute, KeyType, Mechanism, MechanismFlag

from interlock.errors import Conflict, Denied, NotFound, Refusal, Unavailable, Untrusted
from interlock.tier import Tier
from kms import pkcs11 as tokened
from kms.assignment import TokenPlace
from kms.pkcs11 import MODULE, Module, Token, open_token
from kms.provider import Context
from kms.ring import KeyRing
from tests.contract.kms_provider import RUN, ProviderContract
from tests.kms.conftest import Tokens


@pytest.fixture
def state_file(tmp_path: Path) -> Path:
    return tmp_path / "pkcs11.json"


@pytest.fixture
def safe(token: Token) -> Token:
    return token


@pytest.fixture
def provider(token: Token, state_file: Path) -> KeyRing:
    return KeyRing("pkcs11", token, state_file, frozenset(Tier))


class TestPkcs11(ProviderContract):
    """The contract over a token."""


def test_critical_is_wrapped_by_the_token(provider: KeyRing) -> None:
    context = Context("lab", "m", "run_1", Tier.CRITICAL)
    key, wrapped = provider.generate(context)
    assert provider.unwrap(wrapped, context) == key


def test_the_key_does_not_leave_the_token(provider: KeyRing, token: Token) -> None:
    provider.generate(RUN)
    key = token._key(1)
    with pytest.raises(pkcs11.AttributeSensitive):
        key[Attribute.VALUE]
    wrapping = token._session.generate_key(KeyType.AES, 256, store=False)
    with pytest.raises(pkcs11.KeyUnextractable):
        wrapping.wrap_key(key, mechanism=Mechanism.AES_KEY_WRAP)
    assert provider.health().ok


def test_refuses_when_a_key_could_be_read_out_or_was_brought_in(provider: KeyRing, token: Token) -> None:
    provider.prepare()
    plain = {Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}
    uses = MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT
    token._session.generate_key(KeyType.AES, 256, label="interlock-kek/v2", store=True, template=plain,
                                capabilities=uses)
    token._session.create_object({
        Attribute.CLASS: pkcs11.ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.AES, Attribute.VALUE: b"\1" * 32,
        Attribute.LABEL: "interlock-kek/v3", Attribute.TOKEN: True, Attribute.SENSITIVE: True,
        Attribute.EXTRACTABLE: False, Attribute.ENCRYPT: True, Attribute.DECRYPT: True})
    for version in (2, 3):
        with pytest.raises(Untrusted) as refused:
            token.seal(version, b"\0" * 12, b"", b"x")
        assert refused.value.code == "untrusted.kek_attributes"
    assert token.seal(1, b"\0" * 12, b"", b"x")


def test_refuses_when_two_keys_have_one_label(provider: KeyRing, token: Token) -> None:
    _, wrapped = provider.generate(RUN)
    token._session.generate_key(KeyType.AES, 256, label="interlock-kek/v1", store=True)
    token._keys.clear()
    with pytest.raises(Untrusted) as refused:
        provider.unwrap(wrapped, RUN)
    assert refused.value.code == "untrusted.kek_label"
    with pytest.raises(Conflict):
        token.make(1)


def test_a_fault_of_the_token_is_told_from_a_fault_of_the_ciphertext(
    provider: KeyRing, token: Token, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GeneralError is what SoftHSM says for both."""
    key, wrapped = provider.generate(RUN)

    def broken(*_: object) -> bytes:
        raise pkcs11.GeneralError

    with monkeypatch.context() as patch:
        patch.setattr(tokened, "_opened", broken)
        with pytest.raises(Unavailable) as refused:
            provider.unwrap(wrapped, RUN)
    assert (refused.value.code, refused.value.details) == ("unavailable.provider", {"reason": "GeneralError"})
    with pytest.raises(Untrusted):
        provider.unwrap(replace(wrapped, data=wrapped.data[:-1] + bytes([wrapped.data[-1] ^ 1])), RUN)
    assert provider.unwrap(wrapped, RUN) == key


def test_a_token_that_was_away_needs_no_new_process(provider: KeyRing, tokens: Tokens) -> None:
    key, wrapped = provider.generate(RUN)
    there, away = tokens.folder / "tokens", tokens.folder / "away"
    there.rename(away)
    try:
        for _ in range(2):
            with pytest.raises(Refusal) as refused:
                provider.unwrap(wrapped, RUN)
            assert refused.value.code == "unavailable.provider"
        assert not provider.health().ok
    finally:
        away.rename(there)
    assert provider.unwrap(wrapped, RUN) == key
    assert provider.health().ok


def test_eight_threads_of_300_operations_leave_it_working(provider: KeyRing) -> None:
    """Pitfall 10 (python-pkcs11#171, softhsm#688)."""
    key, wrapped = provider.generate(RUN)
    faults: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(300):
                assert provider.unwrap(wrapped, RUN) == key
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert provider.rotate() == 2
    assert provider.unwrap(wrapped, RUN) == key


def test_who_waits_for_a_token_that_hangs_is_answered(
    provider: KeyRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, wrapped = provider.generate(RUN)
    monkeypatch.setattr(tokened, "WAIT_S", 0.05)
    with MODULE._lock, pytest.raises(Unavailable) as refused:
        provider.unwrap(wrapped, RUN)
    assert refused.value.details == {"reason": "busy"}
    assert provider.unwrap(wrapped, RUN) == key


class Counting:
    """The module's library, counting how often a token is looked for (right before its PIN is shown)."""

    def __init__(self, library: Any) -> None:
        self.library, self.asked = library, 0

    def get_token(self, **words: Any) -> Any:
        self.asked += 1
        return self.library.get_token(**words)


def test_a_pin_that_was_refused_is_not_shown_again(
    tokens: Tokens, token: Token, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens lock themselves after a few wrong ones."""
    pin = tmp_path / "pin"
    pin.touch(0o600)
    pin.write_bytes(b"wrong pin")
    other = Token(replace(tokens.place, pin_file=pin))
    counting = Counting(MODULE._library)
    token.close()  # while one session is logged in, the whole process is
    with monkeypatch.context() as patch:
        patch.setattr(MODULE, "_library", counting)
        for _ in range(3):
            with pytest.raises(Denied) as refused:
                other.present()
            assert refused.value.code == "denied.token"
            assert "wrong pin" not in str(refused.value.as_json())
        assert counting.asked == 1
        pin.write_bytes(tokens.place.pin_file.read_bytes())
        assert other.present() == frozenset()
        assert counting.asked == 2
    other.close()


def test_refuses_when_others_can_read_the_pin(tokens: Tokens, tmp_path: Path) -> None:
    pin = tmp_path / "pin"
    pin.write_bytes(tokens.place.pin_file.read_bytes())
    other = Token(replace(tokens.place, pin_file=pin))
    pin.chmod(0o644)
    with pytest.raises(Untrusted):
        other.present()
    pin.chmod(0o600)
    assert isinstance(other.present(), frozenset)
    other.close()


def test_refuses_when_there_is_no_such_token_or_another_module_is_loaded(tokens: Tokens, token: Token) -> None:
    with pytest.raises(Unavailable) as away:
        Token(replace(tokens.place, token="nobody")).present()
    assert away.value.details == {"reason": "NoSuchToken"}
    with pytest.raises(Conflict) as refused:
        Token(replace(tokens.place, conf=None)).present()
    assert refused.value.code == "conflict.kms_module"
    assert token.present() == frozenset()


def test_refuses_when_others_can_write_the_module_or_it_is_none(tmp_path: Path, tokens: Tokens) -> None:
    file = tmp_path / "module.so"
    file.write_bytes(b"not a module")
    place = TokenPlace(file, "cp", tokens.place.pin_file, tokens.place.conf)
    file.chmod(0o666)
    with pytest.raises(Untrusted), Module().held(place):
        pass
    file.chmod(0o600)
    with pytest.raises(Unavailable), Module().held(place):
        pass
    with pytest.raises(Unavailable), Module().held(replace(place, module=tmp_path / "none.so")):
        pass


def test_a_missing_token_is_asked_nothing_before_the_first_use(tmp_path: Path) -> None:
    """A control plane starts without its token: stops must be accepted."""
    nowhere = TokenPlace(tmp_path / "m.so", "cp", tmp_path / "pin", tmp_path / "conf")
    provider = open_token(nowhere, tmp_path / "pkcs11.json")
    with pytest.raises(Refusal):
        provider.generate(RUN)


def test_a_label_that_is_not_ours_is_no_version(token: Token) -> None:
    token.make(1)
    token._session.generate_key(KeyType.AES, 256, label="interlock-kek/v01", store=True)
    token._session.generate_key(KeyType.AES, 256, label="other", store=True)
    assert token.present() == {1}
    with pytest.raises(NotFound):
        token.seal(2, b"\0" * 12, b"", b"x")
