"""The output filter: what it cuts, and that it does not matter where a stream was cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runners.inference.filters import LOCAL, Withholder, withhold

PARTS = ["http://", "HTTPS://", "ftp://", "www.", "http:/", "htt", "ww", "@", "a", "b.c", "ſ", "é", " ", "\n", ".", "/",
         "[", "x" * 70, "hello", "<", "w", "h", "s", ":"]


def streamed(text: str, cuts: list[int]) -> tuple[str, int]:
    """Return what is shown of `text` in pieces, and the most that was ever held back."""
    one, shown, most, at = Withholder(), "", 0, 0
    for size in cuts:
        shown += one.feed(text[at:at + size])
        at += size
        most = max(most, len(one._held))
    return shown + one.feed(text[at:]) + one.finish(), most


@given(st.lists(st.sampled_from(PARTS), max_size=20).map("".join), st.lists(st.integers(0, 9), max_size=60))
def test_a_stream_shows_what_the_whole_text_shows(text: str, cuts: list[int]) -> None:
    shown, most = streamed(text, cuts)
    assert shown == withhold(text)
    assert most <= LOCAL + 1


@given(st.text(max_size=80), st.lists(st.integers(0, 5), max_size=30))
def test_so_for_any_text(text: str, cuts: list[int]) -> None:
    assert streamed(text, cuts)[0] == withhold(text)


@pytest.mark.parametrize(("text", "shown"), [
    ("see http://a.b/c?d now", "see [link withheld] now"), ("see HtTpS://a.b", "see [link withheld]"),
    ("www.a.b and ftp://c", "[link withheld] and [link withheld]"), ("(http://a.b)", "([link withheld]"),
    ("mail me@a.b, please", "mail [address withheld] please"), ("müller@a.b", "[address withheld]"),
    ("http://u@h x", "[link withheld] x"),
])
def test_what_is_cut(text: str, shown: str) -> None:
    assert withhold(text) == shown


@pytest.mark.parametrize("text", ["a @ b", "http:/ is no link", "wwww", "me@", "@you", "10/2 = 5; x.y", "", "no links"])
def test_what_is_left_alone(text: str) -> None:
    assert withhold(text) == text


def test_a_match_that_is_split_is_caught_and_the_rest_is_not_held_up() -> None:
    one = Withholder()
    assert one.feed("plain words go on ") == "plain words go on "
    assert one.feed("ht") == ""
    assert one.feed("tp:/") == ""
    assert one.feed("/secret.example/path") == "[link withheld]"
    assert one.feed("more of it and") == " of it "
    assert one.finish() == "and"
    assert one.count == 1
