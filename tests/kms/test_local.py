"""The local provider: the contract, and what files bring with them."""

import os
from pathlib import Path

import pytest

from interlock.errors import Denied, Refusal, Untrusted
from interlock.tier import Tier
from kms.local import KeyFolder, open_folder
from kms.provider import Context
from kms.ring import KeyRing
from tests.contract.kms_provider import RUN, ProviderContract

BOTH = frozenset({Tier.NONE, Tier.HIGH})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run-kek"


@pytest.fixture
def provider(folder: Path) -> KeyRing:
    return open_folder(folder, BOTH)


@pytest.fixture
def safe(provider: KeyRing) -> object:
    return provider._safe


@pytest.fixture
def state_file(folder: Path) -> Path:
    return folder / "state.json"


class TestLocal(ProviderContract):
    """The contract over key files."""


def test_files_are_private(provider: KeyRing, folder: Path) -> None:
    provider.generate(RUN)
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert {oct(p.stat().st_mode & 0o777) for p in folder.iterdir()} == {"0o600"}
    assert {p.name for p in folder.iterdir()} == {"v1.key", "state.json", "state.lock"}


def test_refuses_when_others_can_read_the_key_or_look_into_its_folder(provider: KeyRing, folder: Path) -> None:
    key, wrapped = provider.generate(RUN)
    for path, wrong, right in ((folder / "v1.key", 0o640, 0o600), (folder, 0o750, 0o700), (folder, 0o701, 0o700)):
        path.chmod(wrong)
        with pytest.raises(Untrusted):
            provider.unwrap(wrapped, RUN)
        path.chmod(right)
        assert provider.unwrap(wrapped, RUN) == key


def test_refuses_when_the_folder_is_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir(mode=0o700)
    os.symlink(tmp_path / "there", tmp_path / "here")
    with pytest.raises(Untrusted) as refused:
        KeyFolder(tmp_path / "here").present()
    assert refused.value.code == "untrusted.key_folder_mode"
    assert KeyFolder(tmp_path / "there").present() == frozenset()


@pytest.mark.parametrize(("tiers", "tier"), [(frozenset(Tier), Tier.CRITICAL), (frozenset({Tier.NONE}), Tier.HIGH)])
def test_refuses_when_the_tier_is_critical_or_high_without_the_settings_word(
    folder: Path, tiers: frozenset[Tier], tier: Tier
) -> None:
    provider = open_folder(folder, tiers)
    context = Context("lab", "m", "run_1", tier)
    _, wrapped = provider.generate(RUN)
    for use in (lambda: provider.generate(context), lambda: provider.unwrap(wrapped, context),
                lambda: provider.rewrap(wrapped, context)):
        with pytest.raises(Refusal) as refused:
            use()
        assert (type(refused.value), refused.value.code) == (Denied, "denied.provider")
    assert open_folder(folder, BOTH).generate(Context("lab", "m", "run_1", Tier.HIGH))


def test_two_openers_of_one_folder_share_versions_and_state(folder: Path) -> None:
    first, second = open_folder(folder, BOTH), open_folder(folder, BOTH)
    key, wrapped = first.generate(RUN)
    assert second.rotate() == 2
    assert first.generate(RUN)[1].version == 2
    second.disable()
    with pytest.raises(Denied):
        first.unwrap(wrapped, RUN)
    second.enable()
    assert first.unwrap(wrapped, RUN) == key


def test_a_kek_that_was_made_anew_is_another_one(folder: Path, tmp_path: Path) -> None:
    _, wrapped = open_folder(folder, BOTH).generate(RUN)
    other = open_folder(tmp_path / "other", BOTH)
    other.generate(RUN)
    with pytest.raises(Refusal) as refused:
        other.unwrap(wrapped, RUN)
    assert refused.value.code == "not_found.kek"
