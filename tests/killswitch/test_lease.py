"""The lease of one run as a pure value: milliseconds in, deadline out."""

import pytest

from interlock.errors import Stale, Untrusted
from killswitch.lease import Leash


def leash(lease_ms: int = 10_000, absent_ms: int = 10_000) -> Leash:
    return Leash(1_000, lease_ms, absent_ms)


def test_G11_the_deadline_counts_from_admission() -> None:
    assert leash().deadline_ms == 11_000


def test_G13_the_deadline_counts_from_sending_not_from_receipt() -> None:
    one = leash()
    one.open("n1", 2_000)
    assert one.accept("n1", 10_000, 9_500) == 12_000


def test_refuses_when_the_answer_is_for_another_nonce() -> None:
    one = leash()
    one.open("n1", 2_000)
    one.open("n2", 3_000)
    for nonce in ("n1", "n0", ""):
        with pytest.raises(Stale, match="no open heartbeat"):
            one.accept(nonce, 10_000, 3_001)
    assert one.deadline_ms == 11_000
    assert one.accept("n2", 10_000, 3_001) == 13_000


def test_refuses_when_an_answer_is_replayed() -> None:
    one = leash()
    one.open("n1", 2_000)
    one.accept("n1", 10_000, 2_001)
    with pytest.raises(Stale):
        one.accept("n1", 10_000, 5_000)
    assert one.deadline_ms == 12_000


def test_refuses_when_the_deadline_has_passed() -> None:
    one = leash()
    one.open("n1", 10_900)
    with pytest.raises(Stale, match="has ended"):
        one.accept("n1", 10_000, 11_000)
    assert one.accept("n1", 10_000, 10_999) == 20_900


def test_refuses_when_a_lease_is_longer_than_the_launch_order() -> None:
    one = leash()
    one.open("n1", 2_000)
    with pytest.raises(Untrusted) as caught:
        one.accept("n1", 10_001, 2_001)
    assert caught.value.code == "untrusted.duration"
    assert one.accept("n1", 10_000, 2_001) == 12_000


def roll(one: Leash, start: int, end: int) -> int:
    """Tick each 100 ms; return when the deadline passed, or `end`."""
    for now in range(start, end, 100):
        if now >= one.roll(now):
            return now
    return end


def test_bridges_an_absent_control_plane_up_to_its_limit_from_the_last_answer_sent() -> None:
    one = leash(1_000, 5_000)
    one.open("n1", 1_500)
    one.accept("n1", 1_000, 1_600)
    for now in range(1_700, 6_400, 250):
        one.open(f"late{now}", now)
        assert one.roll(now) <= now + 1_000 + 250  # never more than a lease ahead: the supervisor may hang
    assert roll(one, 6_400, 20_000) == 6_500


def test_no_bridge_for_critical_before_an_answer_or_after_a_refusal() -> None:
    critical = leash(1_000, 1_000)
    critical.open("n1", 1_500)
    critical.accept("n1", 1_000, 1_501)
    assert roll(critical, 1_500, 20_000) == 2_500
    assert roll(leash(1_000, 5_000), 1_000, 20_000) == 2_000
    refused = leash(1_000, 5_000)
    refused.open("n1", 1_500)
    refused.accept("n1", 1_000, 1_501)
    assert refused.roll(2_100) == 3_100
    refused.refuse()
    assert refused.deadline_ms == 2_500
    assert roll(refused, 2_200, 20_000) == 2_500
    refused.open("n2", 2_300)
    with pytest.raises(Stale):
        refused.accept("n2", 1_000, 2_301)
