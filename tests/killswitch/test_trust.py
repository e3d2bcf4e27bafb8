"""How the list of believed keys may change."""

import os
from pathlib import Path

import pytest

from interlock.canon import canonical
from interlock.errors import Conflict, Malformed, Untrusted
from interlock.signed import TRUST, public_text, sign
from killswitch.trust import Trust, first, keys_digest, load, parse_body, replace
from tests.killswitch.site import Key, Site, key


def rows(people: dict[str, Key]) -> list[dict[str, str]]:
    return [{"person": p, "key": public_text(k.public_key())} for p, k in sorted(people.items())]


@pytest.fixture
def old(site: Site) -> Trust:
    return first(site.trust())


def test_takes_a_higher_version_by_a_grant_key_in_force(site: Site, old: Trust) -> None:
    assert replace(old, site.trust(version=2, cooldown_ms=5)).version == 2


def test_refuses_when_the_version_is_not_higher(site: Site, old: Trust) -> None:
    with pytest.raises(Conflict):
        replace(old, site.trust(version=1))


def test_refuses_when_the_signer_is_not_in_force(site: Site, old: Trust) -> None:
    stranger = key()
    body = site.trust_body(version=2, grant=[public_text(stranger.public_key())])
    with pytest.raises(Untrusted):
        replace(old, sign(TRUST, body, stranger))


@pytest.mark.parametrize("over", [{"node": "node-b"}, {"threshold": 3}, {"signers": [{"name": "eve", "key": "?"}]}])
def test_refuses_when_node_threshold_or_signers_change(site: Site, old: Trust, over: dict[str, object]) -> None:
    if "signers" in over:
        over = {"signers": [{"name": "eve", "key": public_text(key().public_key())}]}
    with pytest.raises(Untrusted, match="never change"):
        replace(old, site.trust(version=2, **over))


def test_refuses_when_persons_change_without_two_persons(site: Site, old: Trust) -> None:
    people = {**site.people, "eve": key()}
    for approvals in (
        [], [site.trust_approval("ada", 2, people)], [site.trust_approval("ada", 2, people)] * 2,
        [site.trust_approval("ada", 2, people), site.trust_approval("bela", 3, people)],
        [site.trust_approval("ada", 2, people), site.trust_approval("bela", 2, site.people)],
    ):
        with pytest.raises(Untrusted, match="approved this trust list"):
            replace(old, site.trust(version=2, persons=rows(people), approvals=approvals))
    good = [site.trust_approval(p, 2, people) for p in ("ada", "bela")]
    assert "eve" in replace(old, site.trust(version=2, persons=rows(people), approvals=good)).persons


def test_refuses_when_fewer_persons_than_the_threshold_would_stay(site: Site, old: Trust) -> None:
    """Even two persons cannot put a node back into bootstrap, where the control plane alone adds persons."""
    one, two = ({p: site.people[p] for p in names} for names in (("ada",), ("ada", "bela")))
    approvals = [site.trust_approval(p, 2, one) for p in ("ada", "bela")]
    with pytest.raises(Untrusted, match="below its threshold"):
        replace(old, site.trust(version=2, persons=rows(one), approvals=approvals))
    good = [site.trust_approval(p, 2, two) for p in ("ada", "bela")]
    assert set(replace(old, site.trust(version=2, persons=rows(two), approvals=good)).persons) == {"ada", "bela"}


def test_refuses_when_keys_change_or_the_cool_down_shrinks_unapproved() -> None:
    site = Site(cooldown_ms=1000)
    old = first(site.trust())
    new_grant = [public_text(key().public_key())]
    for over in ({"grant": new_grant}, {"cooldown_ms": 10}):
        approvals = [site.trust_approval(p, 2, site.people) for p in ("ada", "bela")]
        with pytest.raises(Untrusted):
            replace(old, site.trust(version=2, approvals=approvals, **over))
        wanted = keys_digest(parse_body(site.trust_body(**over)))
        good = [site.trust_approval(p, 2, site.people, keys_digest=wanted) for p in ("ada", "bela")]
        assert replace(old, site.trust(version=2, approvals=good, **over)).version == 2


def test_bootstrap_adds_persons_up_to_the_threshold_only() -> None:
    site = Site(people={"ada": key()})
    old = first(site.trust())
    assert old.bootstrap
    two, three = {**site.people, "bela": key()}, {**site.people, "bela": key(), "cleo": key()}
    assert not replace(old, site.trust(version=2, persons=rows(two))).bootstrap
    with pytest.raises(Untrusted):
        replace(old, site.trust(version=2, persons=rows(three)))
    with pytest.raises(Untrusted):
        replace(old, site.trust(version=2, persons=rows({"ada": key(), "bela": key()})))


def test_refuses_when_a_key_serves_two_purposes_or_persons(site: Site) -> None:
    shared = key()
    for over in (
        {"stop": [public_text(site.grant.public_key())]}, {"threshold": 1}, {"grant": []},
        {"persons": rows({"ada": shared, "bela": shared})},
        {"persons": [*rows({"ada": key()}), *rows({"ada": key()})]},
    ):
        with pytest.raises(Malformed):
            parse_body(site.trust_body(**over))
    assert parse_body(site.trust_body()).threshold == 2


def test_refuses_when_others_can_write_the_file(tmp_path: Path, site: Site) -> None:
    path = tmp_path / "trust.json"
    assert load(path) is None
    path.write_bytes(canonical(site.trust().as_json()))
    os.chmod(path, 0o600)
    found = load(path)
    assert found is not None
    assert found.node == "node-a"
    os.chmod(path, 0o666)
    with pytest.raises(Untrusted):
        load(path)
