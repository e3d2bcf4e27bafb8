"""From the engine's first frame to the client's last byte, and the record of how it ended.

The answer is hashed as it is shown. From tier high on the record is durable before the last byte leaves; at tier none
it is written meanwhile. How it ended is one word: ok, stopped, aborted (the client left), truncated (the engine died
after the first byte), error (before it).
"""

import asyncio
import hashlib
import time
from typing import Any

from interlock.errors import Halted, NotRecorded, Refusal
from interlock.terms import Terms
from interlock.tier import Tier
from policy.snapshot import ModelRow
from runners.inference import answers
from runners.inference.answers import Shape
from runners.inference.evidence import Answered, Evidence
from runners.inference.exchange import Exchange, Gone
from runners.inference.filters import Withholder
from runners.inference.listening import Listening, count, unreadable

DIMENSIONS, WIDEST = 4096, 1e30
FAULT = "unavailable.fault"


class Answering:
    """One answer.

    Args: `exchange` the client; `listening` the engine; `shape` how it looks; `terms` what the permit allows; `row`
    whose tier says when the record is durable; `record` to be completed and written; `started_ns` of CLOCK_MONOTONIC.
    """

    def __init__(
        self, exchange: Exchange, listening: Listening, shape: Shape, terms: Terms, row: ModelRow, record: Answered,
        evidence: Evidence, started_ns: int,
    ) -> None:
        self._exchange, self._listening, self._shape, self._terms = exchange, listening, shape, terms
        self._record, self._evidence, self._started_ns = record, evidence, started_ns
        self._durable_first = row.tier is not Tier.NONE
        self._withholder = Withholder(shape.asked.prompt) if terms.withhold else None
        self._text: list[str] = []
        self._digest, self._bytes, self._first_us = hashlib.sha256(), 0, 0
        self._written = False

    async def run(self) -> None:
        """Answer; every way in which it can end leaves a record."""
        try:
            if self._shape.asked.kind == "embedding":
                await self._vectors()
            else:
                await self._texts()
        except Gone:
            await self._over("aborted", None)
        except Halted as stop:
            await self._over("stopped", stop)
        except Refusal as refusal:
            await self._over("truncated" if self._exchange.begun else "error", refusal)
        except asyncio.CancelledError:
            self._note("aborted", "")
            raise
        except Exception:  # a fault of ours is on record too, and the front tells the client of it
            self._note("truncated" if self._exchange.begun else "error", FAULT)
            raise

    async def _texts(self) -> None:
        shape, asked = self._shape, self._shape.asked
        most = min(asked.max_tokens, self._terms.max_tokens)
        async for piece in self._listening.pieces(most):
            await self._show(piece if self._withholder is None else self._withholder.feed(piece))
        if self._withholder is not None:
            await self._show(self._withholder.finish())
        end = self._listening.end
        if "completion_tokens" in end:
            shape.usage.prompt, shape.usage.completion = end["prompt_tokens"], end["completion_tokens"]
            shape.usage.estimated = False
        else:
            shape.usage.completion = self._listening.tokens
        await self._settle()
        if asked.stream:
            await self._begin()
            await self._exchange.finish(shape.last(end["reason"]))
        else:
            await self._exchange.reply(shape.whole("".join(self._text), end["reason"]))

    async def _show(self, text: str) -> None:
        if not text:
            return
        data = text.encode()
        self._digest.update(data)
        self._bytes += len(data)
        self._first_us = self._first_us or self._us()
        if not self._shape.asked.stream:
            self._text.append(text)
            return
        await self._begin()
        await self._exchange.piece(self._shape.piece(text), self._listening.look)

    async def _begin(self) -> None:
        if not self._exchange.begun:
            await self._exchange.begin()
            first = self._shape.first()
            if first:
                await self._exchange.piece(first, self._listening.look)

    async def _vectors(self) -> None:
        frame = await self._listening.frame()
        rows = _rows(frame.get("vectors"), len(self._shape.asked.inputs))
        self._shape.usage.prompt, self._shape.usage.estimated = count(frame, "prompt_tokens"), False
        self._listening.whole = True
        value = self._shape.vectors(rows)
        data = answers.encode({"data": value["data"]})
        self._digest.update(data)
        self._bytes, self._first_us = len(data), self._us()
        await self._settle()
        await self._exchange.reply(value)

    async def _settle(self) -> None:
        """Look a last time, then record: what follows is the last byte."""
        self._listening.look()
        if self._durable_first:
            self._written = True
            await self._evidence.durable(self._event("ok", ""))
        else:
            self._note("ok", "")

    async def _over(self, outcome: str, refusal: Refusal | None) -> None:
        """End an answer that is not whole: no further token, then record it, then say so to whoever is still there."""
        self._listening.leave()
        if not self._written:
            self._shape.usage.completion = self._listening.tokens
            code = "" if refusal is None else refusal.code
            if self._durable_first:
                self._written = True
                try:
                    await self._evidence.durable(self._event(outcome, code))
                except NotRecorded as lost:
                    refusal = refusal and lost
            else:
                self._note(outcome, code)
        if refusal is not None:
            await self._exchange.refuse(refusal)

    def _note(self, outcome: str, code: str) -> None:
        if not self._written:
            self._written = True
            self._evidence.note(self._event(outcome, code))

    def _event(self, outcome: str, code: str) -> Any:
        usage = self._shape.usage
        self._record.facts.update({
            "outcome": outcome, "output": f"sha256:{self._digest.hexdigest()}", "output_bytes": self._bytes,
            "tokens_in": usage.prompt, "tokens_out": usage.completion, "estimated": usage.estimated,
            "first_us": self._first_us, "duration_us": self._us(), "stream": self._shape.asked.stream,
            "withheld": 0 if self._withholder is None else self._withholder.count, **({"code": code} if code else {}),
        })
        return self._record.event()

    def _us(self) -> int:
        return (time.monotonic_ns() - self._started_ns) // 1000


def _rows(value: object, wanted: int) -> list[list[float]]:
    if not isinstance(value, list) or len(value) != wanted:
        raise unreadable()
    for row in value:
        if not isinstance(row, list) or not 1 <= len(row) <= DIMENSIONS:
            raise unreadable()
        if not all(isinstance(x, int | float) and not isinstance(x, bool) and abs(x) < WIDEST for x in row):
            raise unreadable()
    return value
