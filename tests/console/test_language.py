"""Labels exist in both languages; vendored files are what their list says."""

import hashlib
import re
from pathlib import Path

import pytest

from control_plane.console.language import catalogue, choose, translate

CONSOLE = Path(__file__).resolve().parents[2] / "control_plane" / "console"
SHOWN_STATES = (
    "confirmed",
    "not_confirmed",
    "unreachable",
    "pending",
    "placed",
    "admitted",
    "live",
    "ended",
    "stopped",
    "refused",
    "lost",
    "open",
    "used",
    "expired",
    "void",
    "none",
    "high",
    "critical",
    "launch",
    "resume",
    "trust",
    "added",
    "stays",
    "removed",
    "allow",
    "deny",
    "draft",
    "approved",
    "serving",
    "retired",
    "version",
    "state",
    "weights",
)


def messages() -> set[str]:
    pattern = re.compile(r"""_\((['"])(.*?)\1\)""")
    return {m.group(2) for page in (CONSOLE / "templates").glob("*.html") for m in pattern.finditer(page.read_text())}


def test_every_label_is_translated() -> None:
    assert len(messages()) > 80
    assert not (messages() | set(SHOWN_STATES)) - set(catalogue("zh"))


def test_no_bare_text_in_templates() -> None:
    """Text between tags goes through `_()`, names of the product and of commands apart."""
    allowed = {"Interlock", "English", "简体中文", "interlock", "#", "ms"}
    bare = []
    for page in (CONSOLE / "templates").glob("*.html"):
        text = re.sub(r"<(code|pre)\b.*?</\1>|{%.*?%}|{{.*?}}|{#.*?#}", " ", page.read_text(), flags=re.S)
        for found in re.findall(r">([^<>]+)<", text):
            words = [w for w in re.findall(r"[A-Za-z]{2,}", found) if w not in allowed and w not in {"UTC"}]
            if words:
                bare.append((page.name, words))
    assert not bare


@pytest.mark.parametrize(
    ("asked", "cookie", "accept", "want"),
    [
        (None, None, "zh-CN,zh;q=0.9,en;q=0.5", "zh"),
        (None, None, "de-DE", "en"),
        ("en", "zh", "zh", "en"),
        (None, "zh", "en", "zh"),
        ("xx", None, "", "en"),
    ],
)
def test_language_choice(asked: str | None, cookie: str | None, accept: str, want: str) -> None:
    assert choose(asked, cookie, accept) == want


def test_a_missing_label_is_shown_in_english() -> None:
    assert translate("zh", "no such label") == "no such label"


def test_vendored_files_match_their_list() -> None:
    folder = CONSOLE / "static" / "vendor"
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    present = {p.name for p in folder.iterdir() if not p.name.startswith(("LICENSE", "SHA256SUMS"))}
    assert set(listed) == present
    for name, digest in listed.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
