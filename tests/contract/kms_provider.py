"""What every key provider must do, as one suite: a class of tests that each provider's test file inherits.

It gives `provider` (a fresh KeyRing over the real thing), `safe` (what holds its keys) and `state_file`.
"""

import inspect
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from interlock.errors import Conflict, Denied, Malformed, NotFound, Refusal, Unavailable, Untrusted
from interlock.tier import Tier
from kms.provider import Context, Wrapped, pack
from kms.ring import KeyRing

RUN = Context("lab", "small", "run_1", Tier.NONE)
OTHERS = [replace(RUN, run="run_2"), replace(RUN, tenant="lab2"), replace(RUN, model=""),
          replace(RUN, tier=Tier.HIGH)]


def code_of(refused: "pytest.ExceptionInfo[Refusal]") -> str:
    return refused.value.code


class ProviderContract:
    """Inherit and give the three fixtures."""

    def test_a_run_key_comes_back_for_its_own_context_and_no_two_are_alike(self, provider: KeyRing) -> None:
        key, wrapped = provider.generate(RUN)
        other, _ = provider.generate(RUN)
        assert len(key) == 32
        assert key != other
        assert key not in wrapped.data
        assert provider.unwrap(wrapped, RUN) == key
        assert (wrapped.provider, wrapped.version) == (provider.name, 1)

    @pytest.mark.parametrize("other", OTHERS, ids=["run", "tenant", "model", "tier"])
    def test_refuses_when_the_context_is_another(self, provider: KeyRing, other: Context) -> None:
        key, wrapped = provider.generate(RUN)
        with pytest.raises(Untrusted) as refused:
            provider.unwrap(wrapped, other)
        assert code_of(refused) == "untrusted.key_context"
        with pytest.raises(Untrusted):
            provider.rewrap(wrapped, other)
        assert provider.unwrap(wrapped, RUN) == key

    @pytest.mark.parametrize("other", OTHERS, ids=["run", "tenant", "model", "tier"])
    def test_refuses_when_a_wrapped_key_is_relabelled_for_another_context(
        self, provider: KeyRing, other: Context
    ) -> None:
        """The digest in front can be exchanged by anyone; the tag is what refuses."""
        key, wrapped = provider.generate(RUN)
        forged = replace(wrapped, data=pack(other, wrapped.data[36:48], wrapped.data[48:]))
        with pytest.raises(Untrusted) as refused:
            provider.unwrap(forged, other)
        assert code_of(refused) == "untrusted.wrapped_key"
        assert provider.unwrap(wrapped, RUN) == key

    def test_refuses_when_there_is_no_context(self, provider: KeyRing) -> None:
        _, wrapped = provider.generate(RUN)
        with pytest.raises(TypeError):
            provider.unwrap(wrapped)  # type: ignore[call-arg]
        for absent in ({}, {"tenant": "lab", "model": "", "run": "run_1"}, None):
            with pytest.raises(Malformed):
                Context.from_json(absent)
        assert Context.from_json(RUN.as_json()) == RUN

    def test_refuses_when_the_wrapped_bytes_are_damaged(self, provider: KeyRing) -> None:
        key, wrapped = provider.generate(RUN)
        good = wrapped.data
        spoilt = [b"", good[:-1], good + b"\0", b"IWK2" + good[4:]]
        spoilt += [good[:i] + bytes([good[i] ^ 1]) + good[i + 1:] for i in (36, 48, 79, len(good) - 1)]
        for data in spoilt:
            with pytest.raises(Untrusted) as refused:
                provider.unwrap(replace(wrapped, data=data), RUN)
            assert code_of(refused) == "untrusted.wrapped_key"
            assert key.hex() not in str(refused.value.as_json())
        assert provider.unwrap(wrapped, RUN) == key

    def test_refuses_when_a_nonce_is_named(self, provider: KeyRing) -> None:
        """Pitfall 8 (vault PR#22852): a nonce that a caller named was honoured."""
        for method in (provider.generate, provider.rewrap, provider.unwrap):
            assert "nonce" not in inspect.signature(method).parameters
        with pytest.raises(TypeError):
            provider.generate(RUN, nonce=b"\0" * 12)  # type: ignore[call-arg]
        nonces = {provider.generate(RUN)[1].data[36:48] for _ in range(8)}
        assert len(nonces) == 8

    def test_rotation_and_rewrap_keep_the_key_and_obey_the_version(self, provider: KeyRing) -> None:
        key, first = provider.generate(RUN)
        assert (provider.rotate(), provider.rotate()) == (2, 3)
        assert provider.generate(RUN)[1].version == 3
        second = provider.rewrap(first, RUN, to_version=2)
        newest = provider.rewrap(second, RUN)
        back = provider.rewrap(newest, RUN, to_version=1)
        assert [w.version for w in (second, newest, back)] == [2, 3, 1]
        assert {provider.unwrap(w, RUN) for w in (first, second, newest, back)} == {key}
        for wrong in (0, 4):
            with pytest.raises(Denied) as refused:
                provider.rewrap(first, RUN, to_version=wrong)
            assert code_of(refused) == "denied.kek_version"

    def test_refuses_when_the_version_is_below_the_minimum(self, provider: KeyRing) -> None:
        key, old = provider.generate(RUN)
        provider.rotate()
        new = provider.rewrap(old, RUN)
        assert provider.unwrap(old, RUN) == key
        provider.set_minimum(2)
        for use in (lambda: provider.unwrap(old, RUN), lambda: provider.rewrap(new, RUN, to_version=1)):
            with pytest.raises(Denied) as refused:
                use()
            assert code_of(refused) == "denied.kek_version"
        assert provider.unwrap(new, RUN) == key
        assert provider.versions().minimum == 2

    def test_refuses_when_the_minimum_is_above_the_newest(self, provider: KeyRing) -> None:
        """vault#925: such a minimum crashed it."""
        key, wrapped = provider.generate(RUN)
        for wrong in (2, 0, -1):
            with pytest.raises(Denied) as refused:
                provider.set_minimum(wrong)
            assert code_of(refused) == "denied.kek_version"
        provider.set_minimum(1)
        assert provider.unwrap(wrapped, RUN) == key

    def test_refuses_when_disabled_and_asks_no_key_at_all(
        self, provider: KeyRing, safe: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        key, wrapped = provider.generate(RUN)
        asked: list[str] = []
        provider.disable()
        with monkeypatch.context() as patch:
            for name in ("open", "seal", "make"):
                patch.setattr(safe, name, lambda *_, name=name: asked.append(name))
            for use in (lambda: provider.unwrap(wrapped, RUN), lambda: provider.generate(RUN),
                        lambda: provider.rewrap(wrapped, RUN), provider.rotate):
                with pytest.raises(Denied) as refused:
                    use()
                assert code_of(refused) == "denied.kek_disabled"
        assert asked == []
        assert provider.health().code == "denied.kek_disabled"
        provider.enable()
        assert provider.unwrap(wrapped, RUN) == key
        assert provider.health().ok

    def test_refuses_when_another_kek_wrapped_it(self, provider: KeyRing) -> None:
        key, wrapped = provider.generate(RUN)
        for other in (replace(wrapped, kek="kek-0"), replace(wrapped, provider="vault")):
            with pytest.raises(NotFound) as refused:
                provider.unwrap(other, RUN)
            assert code_of(refused) == "not_found.kek"
        assert provider.unwrap(wrapped, RUN) == key

    def test_a_version_that_does_not_work_never_becomes_the_newest(
        self, provider: KeyRing, safe: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pitfall 9 (vault PR#23723)."""
        key, wrapped = provider.generate(RUN)
        real = safe.open
        with monkeypatch.context() as patch:
            patch.setattr(safe, "open", lambda v, *rest: b"\0" * 32 if v == 2 else real(v, *rest))
            with pytest.raises(Unavailable):
                provider.rotate()
            assert provider.versions().newest == 1
            assert provider.generate(RUN)[1].version == 1
        assert provider.rotate() == 3  # a number is never given twice
        assert provider.unwrap(wrapped, RUN) == key

    def test_a_number_is_not_used_twice_after_the_state_came_from_an_older_backup(
        self, provider: KeyRing, state_file: Path
    ) -> None:
        provider.generate(RUN)
        older = state_file.read_bytes()
        provider.rotate()
        key, second = provider.generate(RUN)
        state_file.write_bytes(older)
        with pytest.raises(Denied):
            provider.unwrap(second, RUN)
        assert provider.rotate() == 3
        assert provider.unwrap(second, RUN) == key

    def test_refuses_when_the_state_file_is_gone_spoilt_or_open_to_others(
        self, provider: KeyRing, state_file: Path
    ) -> None:
        key, wrapped = provider.generate(RUN)
        good = state_file.read_bytes()
        value = json.loads(good)
        for bad in (b"", b"[]", b"{}", json.dumps({**value, "disabled": 0}).encode(),
                    json.dumps({**value, "minimum": 0}).encode()):
            state_file.write_bytes(bad)
            with pytest.raises(Malformed):
                provider.unwrap(wrapped, RUN)
        state_file.write_bytes(good)
        state_file.chmod(0o644)
        with pytest.raises(Untrusted):
            provider.unwrap(wrapped, RUN)
        state_file.unlink()
        with pytest.raises(NotFound):
            provider.unwrap(wrapped, RUN)
        with pytest.raises(Conflict) as refused:
            provider.generate(RUN)
        assert code_of(refused) == "conflict.kek_state"
        state_file.write_bytes(good)
        state_file.chmod(0o600)
        assert provider.unwrap(wrapped, RUN) == key

    def test_refuses_when_the_version_is_not_there(self, provider: KeyRing, state_file: Path) -> None:
        key, wrapped = provider.generate(RUN)
        good = state_file.read_bytes()
        state_file.write_bytes(json.dumps({**json.loads(good), "newest": 9}).encode())
        with pytest.raises(NotFound) as refused:
            provider.unwrap(replace(wrapped, version=9), RUN)
        assert code_of(refused) == "not_found.kek"
        state_file.write_bytes(good)
        assert provider.unwrap(wrapped, RUN) == key

    def test_a_wrapped_key_and_a_refusal_show_no_key(self, provider: KeyRing) -> None:
        key, wrapped = provider.generate(RUN)
        assert isinstance(wrapped, Wrapped)
        assert key.hex() not in repr(wrapped)
        assert len(wrapped.data) == 96
