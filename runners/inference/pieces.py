"""From tokens to text that may be sent: whole characters only, and nothing of a stop sequence. Pure.

A token may hold a part of a character, and a stop sequence may lie across tokens: what could still become another
text is held back until it is known.
"""

from collections.abc import Callable, Sequence

_BROKEN = "\N{REPLACEMENT CHARACTER}"
# A character has at most 4 bytes, a token at least one: only the last 3 tokens can be its unfinished beginning.
_UNFINISHED = 3
_PATIENCE = 16


class Pieces:
    """The text of one answer, as it grows. `decode` turns tokens into text; `stops` end the answer."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._tokens: list[int] = []
        # Text of tokens depends on the ones before (a leading space), so a window of told tokens stays in front.
        self._window, self._read = 0, 0
        self._held = ""
        self.stopped = False

    def push(self, tokens: Sequence[int]) -> str:
        """Take further tokens and return the text that is certain now; sets `stopped` at a stop sequence."""
        found = ""
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(token)
            found += self._stop(self._grown())
        return found

    def finish(self) -> str:
        """Return what was held back, at the end of the answer; an unfinished character is dropped."""
        if self.stopped:
            return ""
        told = self._text(self._window, self._read)
        rest = self._text(self._window, len(self._tokens)).rstrip(_BROKEN)
        found, self._held = self._held + rest[len(told):], ""
        return found

    def _text(self, start: int, end: int) -> str:
        return self._decode(self._tokens[start:end])

    def _grown(self) -> str:
        """Return the new whole characters."""
        told, end = self._text(self._window, self._read), len(self._tokens)
        text = self._text(self._window, end)
        if text.endswith(_BROKEN):
            if end - self._read < _PATIENCE:
                return ""
            end -= _UNFINISHED  # no character is that long: these bytes are none, and waiting helps nobody
            text = self._text(self._window, end)
        if len(text) <= len(told):
            return ""
        self._window, self._read = self._read, end
        return text[len(told):]

    def _stop(self, grown: str) -> str:
        """Return what may be told of the held text and `grown`; keep what may be the start of a stop sequence."""
        text = self._held + grown
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep:]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Return how many last characters of `text` are the first ones of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
