"""The output filter: what it cuts, and that it does not matter where a stream was cut."""

import time

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


@given(st.lists(st.sampled_from(PARTS), max_size=8).map("".join), st.lists(st.sampled_from(PARTS), max_size=12).map(
    "".join), st.lists(st.integers(0, 9), max_size=20))
def test_it_does_not_matter_where_an_answer_to_a_text_was_cut(before: str, text: str, cuts: list[int]) -> None:
    one, at, shown = Withholder(before), 0, ""
    for size in cuts:
        shown += one.feed(text[at:at + size])
        at += size
    shown += one.feed(text[at:]) + one.finish()
    once = Withholder(before)
    assert shown == once.feed(text) + once.finish()
    if not before or before[-1] in " \n":
        assert shown == withhold(text)


@pytest.mark.parametrize(("before", "text", "shown"), [
    ("see https://", "evil.example/a now", "[link withheld] now"),
    ("see https:/", "/evil.example now", "[link withheld] now"),
    ("see ht", "tp://evil.example now", "[link withheld] now"), ("www.ev", "il.example, and", "[link withheld] and"),
    ("mail bob@", "evil.example now", "[address withheld] now"), ("mail bo", "b@evil.example", "[address withheld]"),
    ("mail bob@e", "vil.example now", "[address withheld] now"), ("see ht", "e end", "e end"), ("a ww", "w!", "w!"),
    ("http://a.b ", "is one", "is one"), ("http://a.b", " is one", " is one"), ("http://a.b", "", ""), ("", "x", "x"),
    ("once", " upon", " upon"), ("  ", "x", "x"), ("http://a.b", "/c http://d", "[link withheld] [link withheld]"),
])
def test_a_link_that_begins_in_the_prompt_is_cut_in_the_answer(before: str, text: str, shown: str) -> None:
    one = Withholder(before)
    assert one.feed(text) + one.finish() == shown
    each = Withholder(before)
    assert "".join(map(each.feed, text)) + each.finish() == shown
    assert one.count == each.count == shown.count("withheld")


def test_a_prompt_full_of_links_costs_no_time() -> None:
    begun = time.thread_time()
    for before in ("http://a " * 110_000, "http://a" * 120_000, "a@b" * 300_000, "h" * 1_000_000, "@" * 1_000_000):
        Withholder(before)
    assert time.thread_time() - begun < 2
