"""Listens to one engine for one client: frames as they come, and every reason to stop listening.

In order, at each frame and every quarter of a second of silence: a stop that covers the engine or the caller; the
client that went away; the engine that went away; the engine that says nothing for too long; an answer beyond the
terms, for which the engine is hung up on.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from interlock.call import number
from interlock.errors import Malformed, Refusal, Unavailable, from_json
from interlock.order import Labels
from runners.inference.exchange import LOOK_S, Exchange, Gone
from runners.inference.pool import Line
from runners.inference.stops import Stops, halted

SILENT_S = 120.0
DEATH_S, DEATH_LOOK_S = 1.0, 0.05
_ABOUT_THE_CALL = {
    "malformed.context": ("the prompt leaves no room for an answer", "send a shorter prompt"),
    "malformed.template": ("the model's chat template refuses these messages", "send other roles, or use completions"),
    "malformed.request": ("the model's engine cannot take this call", "see GET /openapi.json"),
}
TOKEN_BYTES = 256  # no token of a vocabulary in use is longer


class Listening:
    """One answer. `tokens` counts what the engine made so far; `whole` says that its last frame was read."""

    def __init__(self, line: Line, exchange: Exchange, stops: Stops, labels: tuple[Labels, ...], call: str) -> None:
        self._line, self._exchange, self._stops, self._labels, self._call = line, exchange, stops, labels, call
        self.tokens = self.bytes = self._frames = 0
        self.whole = False
        self.end: dict[str, Any] = {"reason": "length"}

    def look(self) -> None:
        """Raise Halted when a stop covers this call, Gone when the client has left."""
        order = self._stops.covering(*self._labels)
        if order is not None:
            raise halted(order)
        if self._exchange.left.is_set():
            raise Gone

    def leave(self) -> None:
        """Hang up unless the answer was read to its end: nothing more is made for it, however long the rest takes."""
        if self._line.asked and not self.whole:
            self._line.drop()

    async def frame(self) -> dict[str, Any]:
        """Return the next frame of the answer.

        Raises Halted, Gone, Unavailable (``unavailable.engine_lost``, ``unavailable.engine_silent``), or Malformed
        where the engine says that the call cannot be answered.
        """
        deadline = time.monotonic() + SILENT_S
        line = self._line
        while True:
            self.look()
            line.activity.clear()
            found = line.next()
            if found is not None:
                return self._checked(found)
            if line.lost:
                await self._died()
            if time.monotonic() >= deadline:
                raise Unavailable("the engine says nothing", code="engine_silent", next_step="try again")
            try:
                async with asyncio.timeout(LOOK_S):
                    await line.activity.wait()
            except TimeoutError:
                continue

    async def _died(self) -> None:
        """Raise: an engine dies of a stop before the stop page says so, hence the short wait."""
        for _ in range(int(DEATH_S / DEATH_LOOK_S)):
            self.look()
            await asyncio.sleep(DEATH_LOOK_S)
        raise Unavailable("the engine went away", code="engine_lost", next_step="try again when another one is ready")

    def _checked(self, frame: dict[str, Any]) -> dict[str, Any]:
        if frame.get("id") != self._call and "error" not in frame:
            raise unreadable()
        if isinstance(frame.get("error"), dict):
            self.whole = True
            raise _of_engine(from_json(frame["error"]))
        return frame

    async def pieces(self, most: int) -> AsyncIterator[str]:
        """Yield the text of the answer as it comes; `end` holds why it ended, afterwards.

        Args: `most` tokens. What an engine sends beyond them, or beyond what so many tokens can hold, is not passed
        on: the answer ends with reason ``length`` and the engine was wrong.
        """
        while True:
            frame = await self.frame()
            self._frames += 1
            if "done" in frame:
                self.end, self.whole = _done(frame["done"], self.tokens, most), True
                return
            piece, made = frame.get("delta"), count(frame, "tokens")
            if not isinstance(piece, str):
                raise unreadable()
            self.bytes += len(piece.encode())
            over = self.tokens + max(made, 1 if piece else 0) > most or self.bytes > most * TOKEN_BYTES
            if over or self._frames > most + 1:  # each has a token, but for the last text that was held back
                self._line.overrun()
                return
            self.tokens += made
            if piece:
                yield piece


def _done(value: object, told: int, most: int) -> dict[str, Any]:
    """Return the last frame of an answer in text of which `told` tokens were passed on."""
    if not isinstance(value, dict) or value.get("reason") not in ("stop", "length"):
        raise unreadable()  # `aborted` too: the engine is ending, and the answer is not whole
    count(value, "prompt_tokens")
    if count(value, "completion_tokens", most) < told:
        raise unreadable()  # fewer than it sent: what is on record would be less than what was given
    return value


def count(frame: dict[str, Any], name: str, high: int = 1 << 30) -> int:
    """Return a number of a frame; raises Unavailable for one that is off."""
    try:
        return number(frame, name, high=high)
    except Malformed:
        raise unreadable() from None


def unreadable() -> Unavailable:
    """Return the refusal of an engine whose answer is not one."""
    return Unavailable("the engine's answer cannot be read", code="engine_lost", next_step="try again")


def _of_engine(refusal: Refusal) -> Refusal:
    """Return an engine's refusal as ours: what it says of the call by its code, a fault of its own as a 502.

    Its own words go nowhere: they could hold what the terms of the call withhold, or what a record must not.
    """
    found = _ABOUT_THE_CALL.get(refusal.code)
    if found is not None:
        words, step = found
        return Malformed(words, code=refusal.code.partition(".")[2], next_step=step)
    return Unavailable("the engine could not answer", code="engine_lost", next_step="try again")
