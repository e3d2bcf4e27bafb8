"""What is cut out of an answer under the restricted profile: links and e-mail addresses. Pure.

A text is read as it comes, in pieces of any size, and what comes out does not depend on where it was cut: a match is
decided at the character that completes it, and everything that could still become one is held back. That is a few
characters; the rest of the text goes on at once.

* a link begins with ``http://``, ``https://``, ``ftp://`` or ``www.`` and goes on to the next white space;
* an address is up to 64 characters, ``@`` and what follows to the next white space.

This keeps an honest model from handing out pointers. It does not bind one that spells them out in words.
"""

import re

WITHHELD_LINK, WITHHELD_ADDRESS = "[link withheld]", "[address withheld]"
LOCAL = 64
_BEGINS = ("https://", "http://", "ftp://", "www.")
_LINK = re.compile("|".join(re.escape(b) for b in _BEGINS), re.IGNORECASE | re.ASCII)
_LOCAL = re.compile(r"[\w.%+'!#$&*/=?^`{|}~-]")
_ADDRESS = re.compile(_LOCAL.pattern + r"@[\w\[]")
_SPACE = re.compile(r"\s")


class Withholder:
    """One answer. `feed` each piece, then `finish` once; what they return, joined, is the answer to show.

    Args: `before` the text that the answer goes on with: a link may begin there, and be asked for a bit at a time.
    Nothing of it is shown; of the link, what the answer adds is cut.
    """

    def __init__(self, before: str = "") -> None:
        self._held, self._theirs, self._mark = "", 0, ""
        self._cutting = self._owed = False
        self.count = 0
        self.feed(before.rsplit(maxsplit=1)[-1] if before.strip() and not before[-1].isspace() else "")
        self._theirs = len(self._held)  # so many characters of what is held are not the answer's
        self.count, self._owed = 0, self._cutting

    def feed(self, piece: str) -> str:
        """Return what may be shown now; at most `LOCAL` + 1 characters stay behind."""
        text = self._held + piece
        shown: list[str] = []
        if piece and self._cutting and self._owed and not _SPACE.match(piece):
            shown, self.count = [self._mark], 1
        self._owed = self._owed and not piece
        while True:
            if self._cutting:
                space = _SPACE.search(text)
                if space is None:
                    self._held = ""
                    return "".join(shown)
                text, self._cutting = text[space.start():], False
            found = _first(text)
            if found is None:
                break
            start, end, self._mark = found
            shown += [text[self._theirs:start], self._mark]
            text, self._cutting, self._theirs = text[end:], True, 0
            self.count += 1
        certain = len(text) - _open_end(text)
        self._held = text[certain:]
        shown.append(text[self._theirs:certain])
        self._theirs = max(0, self._theirs - certain)
        return "".join(shown)

    def finish(self) -> str:
        """Return what was held back: nothing completes it any more."""
        left, self._held = self._held[self._theirs:], ""
        return left


def withhold(text: str) -> str:
    """Return a whole text with links and addresses cut out."""
    one = Withholder()
    return one.feed(text) + one.finish()


def _first(text: str) -> tuple[int, int, str] | None:
    """Return (start, end, mark) of the match that is completed first.

    Both patterns are fixed in length and cannot overlap themselves, so the leftmost is the first to be complete.
    """
    link, address = _LINK.search(text), _ADDRESS.search(text)
    if address is not None and (link is None or address.end() < link.end()):
        return _local_start(text, address.start() + 1), address.end(), WITHHELD_ADDRESS
    return None if link is None else (link.start(), link.end(), WITHHELD_LINK)


def _local_start(text: str, end: int) -> int:
    """Return where the local part of an address begins that ends before `end`."""
    start = end
    while start > 0 and end - start < LOCAL and _LOCAL.match(text, start - 1):
        start -= 1
    return start


def _open_end(text: str) -> int:
    """Return how many characters at the end could still become part of a match."""
    at = len(text) - 1 if text.endswith("@") else len(text)
    local = len(text) - _local_start(text, at) if at and _LOCAL.match(text, at - 1) else 0
    last = text[-(max(map(len, _BEGINS)) - 1):].lower()
    begun = max((n for n in range(1, len(last) + 1) if any(b.startswith(last[-n:]) for b in _BEGINS)), default=0)
    return max(local, begun)
