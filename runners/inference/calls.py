"""The stages of a call, in their order: authenticate → limits → validate → route → gate → engine → filter → record.

Nothing behind the gate runs without its permit, and a permit is worth one profile (runners/inference/dispatch.py).
Where the restricted profile is all that policy gives, both questions stand on record: the denied and the allowed.
"""

import asyncio
import time
from dataclasses import dataclass, replace

from interlock.call import Action, new_id
from interlock.canon import digest_bytes
from interlock.errors import Denied, Halted, Malformed, Refusal, TooMany
from interlock.order import Labels
from interlock.permit import Permit
from interlock.terms import Terms
from interlock.tier import Tier
from policy.gate import Gate
from policy.snapshot import ModelRow
from runners.inference import body, dispatch, frames
from runners.inference.answering import Answering
from runners.inference.answers import Shape
from runners.inference.callers import Caller, authenticate
from runners.inference.directory import Directory, call_of
from runners.inference.evidence import Answered, Evidence
from runners.inference.exchange import Exchange, Gone
from runners.inference.limits import Rates, Slots
from runners.inference.listening import Listening
from runners.inference.parameters import READERS, Asked
from runners.inference.pool import Line, Pool
from runners.inference.stops import Stops


class OnRecordError(Exception):
    """Carries a refusal that the gate has recorded already."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.code)
        self.refusal = refusal


@dataclass
class _Known:
    """What is known of a call so far, for the record of its refusal."""

    call: str
    caller: Caller
    row: ModelRow | None = None


class Calls:
    """All calls of one gateway.

    Args: `directory` models and policy; `stops` the stop page; `pool` the engines; `evidence` the records; `node` the
    id of this node.
    """

    def __init__(self, directory: Directory, stops: Stops, pool: Pool, evidence: Evidence, node: str) -> None:
        self.directory, self._stops, self._pool, self._evidence, self._node = directory, stops, pool, evidence, node
        self.rates, self.slots = Rates(), Slots()

    def admit(self, exchange: Exchange) -> Caller:
        """Return who calls, when he is known and within his rate. Raises Untrusted, Denied, Stale, TooMany."""
        caller = authenticate(exchange.headers, self.directory.entitlements(), exchange.source)
        try:
            for name, allowance in caller.limits:
                self.rates.take(name, allowance, time.clock_gettime_ns(time.CLOCK_BOOTTIME))
        except TooMany as refusal:
            self._evidence.counted(caller, exchange.source, refusal)
            raise OnRecordError(refusal) from None
        return caller

    async def infer(self, exchange: Exchange, kind: str) -> None:
        """Answer one call for text or vectors, or refuse it; both leave a record.

        Raises the refusals of callers who are not known, which the front records.
        """
        started_ns = time.monotonic_ns()
        try:
            caller = self.admit(exchange)
        except OnRecordError as told:
            await exchange.refuse(told.refusal)
            return
        known = _Known(new_id("call"), caller)
        exchange.extra["x-request-id"] = known.call
        try:
            with self.slots.hold(*caller.limits):
                await self._call(exchange, kind, caller, known, started_ns)
        except OnRecordError as told:
            await exchange.refuse(told.refusal)
        except TooMany as refusal:
            self._evidence.counted(caller, exchange.source, refusal)
            await exchange.refuse(refusal)
        except Gone:
            self._refused(exchange, known, "aborted")
        except Refusal as refusal:
            self._refused(exchange, known, refusal.code)
            await exchange.refuse(refusal)

    def _refused(self, exchange: Exchange, known: _Known, code: str) -> None:
        """Record a call that reached no engine. What the caller named is shown only where it is a model of ours."""
        facts = {"call": known.call, "route": exchange.path}
        if known.row is not None:
            facts.update(model=known.row.name, version=known.row.version, tier=known.row.tier.value)
        self._evidence.refused(known.caller, exchange.source, code, facts)

    async def _call(self, exchange: Exchange, kind: str, caller: Caller, known: _Known, started_ns: int) -> None:
        data = await exchange.body()
        asked = READERS[kind](body.read(data))
        row, allowed = self.directory.find(asked.model, caller)
        known.row = row
        if not allowed or self._stops.covering(self._labels(caller, row)) is not None:
            await self._permit(caller, row, None, known.call)  # refuses, on record, before any engine is looked for
        line = await self._pool.take(row)
        listening = Listening(line, exchange, self._stops, (line.engine.labels, caller.labels(self._node)), known.call)
        try:
            exchange.watch(line.activity)
            terms, permit = await self._dispatched(asked, caller, row, line, listening, known.call)
            exchange.extra["x-interlock-profile"] = terms.profile
            record = Answered(known.call, caller, line.engine.run, {
                "model": row.name, "version": row.version, "tier": row.tier.value, "profile": terms.profile,
                "route": exchange.path, "decision": permit.record, "input": digest_bytes(data),
                "input_bytes": len(data),
            })
            shape = Shape(asked, known.call, _decided_s(permit))
            await Answering(exchange, listening, shape, terms, row, record, self._evidence, started_ns).run()
        finally:
            exchange.unwatch()
            self._pool.give_back(line, whole=listening.whole)

    async def _dispatched(
        self, asked: Asked, caller: Caller, row: ModelRow, line: Line, listening: Listening, call: str
    ) -> tuple[Terms, Permit]:
        """Ask the gate, then the engine. A stop of somebody else in between voids the permit: then once more."""
        _check_kind(asked, line)
        try:
            return await self._ask(asked, caller, row, line, listening, call)
        except Halted as moved:
            if moved.code != "stopped.epoch":
                raise
        return await self._ask(asked, caller, row, line, listening, call)

    async def _ask(
        self, asked: Asked, caller: Caller, row: ModelRow, line: Line, listening: Listening, call: str
    ) -> tuple[Terms, Permit]:
        permit = await self._permit(caller, row, line, call)
        terms = dispatch.terms_of(permit)
        _check_terms(asked, terms)
        listening.look()
        dispatch.ask(permit, line, row, _frame(asked, terms, call), self._stops.epoch)
        return terms, permit

    async def _permit(self, caller: Caller, row: ModelRow, line: Line | None, call: str) -> Permit:
        """Return the widest permit that policy gives. Raises OnRecordError."""
        try:
            return await self._asked(Action.INFER, caller, row, line, call)
        except OnRecordError as told:
            if row.tier is not Tier.CRITICAL or told.refusal.code != "denied.no_match":
                raise
        return await self._asked(Action.INFER_RESTRICTED, caller, row, line, call)

    def _labels(self, caller: Caller, row: ModelRow) -> Labels:
        """Return what a stop may cover in this call, engine or not: the caller, and the model with its ancestors."""
        return replace(caller.labels(self._node), model=row.name, lineage=row.lineage, tier=row.tier)

    async def _asked(self, action: Action, caller: Caller, row: ModelRow, line: Line | None, call: str) -> Permit:
        own = self._labels(caller, row)
        labels, run = ((own,), "") if line is None else ((line.engine.labels, own), line.engine.run)
        gate = Gate(self.directory.decide, lambda _: self._stops.covering(*labels), self._evidence.record,
                    self._stops.epoch)
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._evidence.threads, gate.ask, call_of(action, caller, row, run, call), self.directory.facts(caller)
            )
        except Refusal as refusal:
            raise OnRecordError(refusal) from None


def _decided_s(permit: Permit) -> int:
    """Return the second of the decision: the id of its record begins with 48 bits of milliseconds."""
    return int(permit.record[:12], 16) // 1000


def _check_kind(asked: Asked, line: Line) -> None:
    hello = line.engine.hello
    wanted = "embedding" if asked.kind == "embedding" else "text"
    if hello is None or hello.kind != wanted:
        raise Malformed(f"this model does not make {'vectors' if wanted == 'embedding' else 'text'}", code="kind",
                        next_step="call another route or another model")


def _check_terms(asked: Asked, terms: Terms) -> None:
    """Refuse what the profile does not give at all; what it gives less of is cut down. Raises Denied."""
    step = "ask a safety officer to enrol you in the partner programme of this model"
    if asked.tools and not terms.tools:
        raise Denied(f"the profile {terms.profile} has no tools", code="tools", next_step=step)
    if asked.kind == "embedding" and terms.withhold:
        raise Denied(f"the profile {terms.profile} has no vectors: nothing can be withheld from them",
                     code="vectors", next_step=step)


def _frame(asked: Asked, terms: Terms, call: str) -> frames.Complete | frames.Embed:
    if asked.kind == "embedding":
        return frames.Embed(call, terms, asked.inputs)
    return frames.Complete(
        call, terms, prompt=None if asked.kind == "chat" else asked.prompt, messages=asked.messages, tools=asked.tools,
        max_tokens=min(asked.max_tokens, terms.max_tokens), temperature=asked.temperature, top_p=asked.top_p,
        stop=asked.stop, seed=asked.seed,
    )
