"""Rates and slots: never more than the bound, whatever the pattern; memory that does not grow; slots that come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from interlock.errors import TooMany, Unavailable
from runners.inference.limits import ANONYMOUS, KEY, SECOND_NS, Allowance, Rates, Slots, source_of

MS = SECOND_NS // 1000


def admitted(rates: Rates, allowance: Allowance, at: list[int], caller: str = "x") -> list[int]:
    found = []
    for now in at:
        try:
            rates.take(caller, allowance, now)
        except TooMany:
            continue
        found.append(now)
    return found


@given(st.lists(st.integers(0, 2_000), max_size=60), st.integers(1, 50), st.integers(1, 20))
def test_no_span_of_time_has_more_than_burst_and_rate(gaps: list[int], per_s: int, burst: int) -> None:
    at, now = [], SECOND_NS
    for gap in gaps:
        now += gap * MS
        at.append(now)
    found = admitted(Rates(), Allowance(per_s, burst, 1), at)
    for first in range(len(found)):
        for last in range(first, len(found)):
            assert (last - first + 1 - burst) * SECOND_NS <= (found[last] - found[first]) * per_s
    assert len(found) >= min(len(at), burst)  # control: the burst is given


def test_refuses_the_anonymous_fourth_call_of_a_second_and_says_when() -> None:
    rates = Rates()
    assert len(admitted(rates, ANONYMOUS, [0, 1, 2])) == 3
    with pytest.raises(TooMany) as refused:
        rates.take("x", ANONYMOUS, 3)
    assert refused.value.code == "too_many.rate"
    assert refused.value.details["retry_after_s"] == 1
    rates.take("y", ANONYMOUS, 3)  # control: another caller
    rates.take("x", ANONYMOUS, SECOND_NS // 3 + 3)  # control: a third of a second later
    assert len(admitted(Rates(), ANONYMOUS, [n * 10 * MS for n in range(300)])) in (11, 12)
    assert len(admitted(Rates(), KEY, [0] * 200)) == 100


def test_a_refused_call_costs_nothing() -> None:
    rates = Rates()
    admitted(rates, ANONYMOUS, [0] * 100)
    assert len(admitted(rates, ANONYMOUS, [SECOND_NS + n for n in range(5)])) == 3


def test_memory_is_bounded_and_forgetting_lifts_no_limit() -> None:
    rates = Rates(most=10)
    for n in range(10):
        rates.take(f"caller {n}", ANONYMOUS, 0)
    with pytest.raises(TooMany):
        rates.take("newcomer", ANONYMOUS, 1)
    rates.take("caller 1", ANONYMOUS, 1)  # control: who is known is judged by himself
    assert len(rates) == 10
    rates.take("newcomer", ANONYMOUS, SECOND_NS)  # their bursts are whole again: nothing to remember
    assert len(rates) == 1


def test_slots_come_back_however_the_block_ends() -> None:
    slots, two = Slots(together=3), Allowance(1, 1, 2)
    with slots.hold(("a", two)), slots.hold(("a", two)):
        with pytest.raises(TooMany) as refused, slots.hold(("a", two)):
            pass
        assert refused.value.code == "too_many.concurrent"
        with slots.hold(("b", two)):
            with pytest.raises(Unavailable) as full, slots.hold(("c", two)):
                pass
            assert full.value.code == "unavailable.busy"
    with slots.hold(("a", two), ("person", two)), slots.hold(("b", two), ("person", two)):
        assert slots.held == 2  # a call counts once in all, and under each of its names
        with pytest.raises(TooMany), slots.hold(("c", two), ("person", two)):
            pass
        with slots.hold(("c", two)):  # control, and the refused one held nothing
            pass
    with pytest.raises(ZeroDivisionError), slots.hold(("a", two)):
        raise ZeroDivisionError
    assert slots.held == 0


@pytest.mark.parametrize(("address", "name"), [
    ("203.0.113.7", "203.0.113.7"), ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
    ("2001:db8:1:2::", "2001:db8:1:2::/64"), ("::ffff:203.0.113.7", "203.0.113.7"),
    ("fe80::1%eth0", "fe80::/64"), ("nonsense", "unknown"),
    ("127.0.0.1", "loopback"), ("127.9.8.7", "loopback"), ("::1", "loopback"), ("::ffff:127.0.0.2", "loopback"),
])
def test_who_shares_a_limit(address: str, name: str) -> None:
    assert source_of(address) == name
