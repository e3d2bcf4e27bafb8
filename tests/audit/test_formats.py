"""The pages of docs/formats cannot drift: their examples are read by the code."""

import re
from pathlib import Path

from audit.leaf import decode
from audit.segment import HEADER_BYTES
from audit.treehead import open_head, parse_vkey
from audit.verify import open_note
from audit.verify import parse_vkey as parse_pinned
from interlock.event import EventType

FORMATS = Path(__file__).parents[2] / "docs/formats"


def _example(page: str) -> str:
    found = re.search(r"```\n(.*?)```", page, re.DOTALL)
    assert found is not None
    return found[1]


def test_the_record_of_the_page_decodes() -> None:
    page = (FORMATS / "record.md").read_text()
    leaf = decode(_example(page).strip().encode())
    assert (leaf.node, leaf.seq, leaf.event["type"]) == ("n1", 7, EventType.CALL_DECIDED)
    assert f"({HEADER_BYTES} bytes)" in page


def test_the_tree_head_of_the_page_verifies_with_both_readers() -> None:
    page = (FORMATS / "tree-head.md").read_text()
    note = _example(page)
    vkey = re.search(r"`(interlock/demo\+[^`]+)`", page)
    assert vkey is not None
    head = open_head(note, "interlock/demo", [parse_vkey(vkey[1])])
    assert head.size == 4242
    assert open_note(note.encode(), parse_pinned(vkey[1]), "head") == head.text()
