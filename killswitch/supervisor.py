"""The kill supervisor's heart: who is stopped, who runs, and the killing. Outlives every other part.

Invariants:
1. One lock; whoever changes the stop state, a run or an effect holds it.
2. A stop is durable before any effect or receipt (G17): latch → state → stop page → runs.
3. KILLING has no way back and goes on until proof; NOT_CONFIRMED is told after five seconds and does not
   end the killing.
4. At start every group in the tree is killed before anything is served; leases are never read back (G15).
5. A group in the tree that is not on the books is killed: no run without a lease.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from interlock.call import new_id
from interlock.canon import canonical
from interlock.errors import Conflict, Denied, NotFound, Refusal, Unavailable
from interlock.order import Labels, Mode, Result, ResumeOrder, Scope, ScopeKind, StopOrder
from interlock.permit import boottime_ms
from interlock.signed import STOP, Signed, public_text, sign, signers
from interlock.tier import Tier
from killswitch import alarm, latch
from killswitch.effect import Effect
from killswitch.ladder import LIMIT_MS, Outcome, climb, strike
from killswitch.latchbook import Latched
from killswitch.order import UNJOINED, Host, kind_of, local_scope, use_break_glass, verify_resume, verify_stop
from killswitch.page import StopPageWriter
from killswitch.runs import Run, State
from killswitch.store import Entry, Store, boot_id, noted_groups
from killswitch.trust import Trust, load
from killswitch.verify import Target, exited
from sandbox.cgroup import UNIFIED, Group, Tree, own_tree

PAGE_MS, LOOK_MS = 250, 1_000
_RETRY_S = 1.0
_KEPT_GONE = 500  # ended attempts that `status` may still show; the books on disk keep all


class Supervisor:
    """State and effects of one host. Start it with `start`, then call `tick` at least every 100 ms."""

    def __init__(self, state: Path, runtime: Path, hook: list[str]) -> None:
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.wake = threading.Event()
        self.runtime, self.hook = runtime, hook
        self.store = Store(state / "supervisor")
        self.boot_id = boot_id()
        self.trust: Trust | None = load(self.store.folder / "trust.json")
        self.tree: Tree = own_tree("interlock-" + hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:8])
        self.state, self.latched = self.store.load(self.node)
        self.page = StopPageWriter(runtime / "stop-page", runtime / "stop-state.json")
        self.runs: dict[str, Run] = {}
        self.books: dict[str, Entry] = {}
        self.effects: dict[str, Effect] = {}
        self.acked: set[str] = set()
        self.nonce = ("", 0)
        self.heard_ms = -(1 << 62)
        self.link: dict[str, Any] = {"connected": False, "last_ms": 0}
        self._paged_ms = self._looked_ms = 0
        self.ending = False

    @property
    def node(self) -> str:
        """Return the node id, `UNJOINED` before the join."""
        return self.trust.node if self.trust else UNJOINED

    @property
    def host(self) -> Host:
        """Return who this supervisor is."""
        return Host(self.node, self.store.key.public_key())

    @property
    def key_text(self) -> str:
        """Return the public key of this supervisor (base64), which the control plane keeps for receipts."""
        return public_text(self.store.key.public_key())

    # -- start ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Sweep: end every run of the tree and of the books, then publish. Waits at most the ladder's limit."""
        # Started from another control group than the last one, its tree lies elsewhere.
        here = f"{self.tree.paths[UNIFIED]}/runs/"
        earlier = [g for g in noted_groups(self.store.folder) if not g.paths.get(UNIFIED, "").startswith(here)]
        with self.lock:
            for entry in self.store.entries():
                self.books[entry.name] = entry
                if not entry.closed:
                    self._sweep_entry(entry)
            self._end_aliens(earlier)
            self._reopen_effects()
            self.publish()
            self.changed.wait_for(lambda: not self.leftovers(), LIMIT_MS / 1000)
        with suppress(OSError):  # a full disk keeps no supervisor from starting
            self.store.write("tree.json", canonical({"paths": self.tree.paths}))
        for page in (self.runtime / "deadlines").glob("*"):
            page.unlink(missing_ok=True)
        self.tick()

    def _sweep_entry(self, entry: Entry) -> None:
        group = Group(entry.name, entry.groups)
        if entry.boot_id == self.boot_id and group.exists():
            run = Run(entry, State.ADMITTED, Target(group), swept=True)
            self.runs[run.name] = run
            self.end(run, "start")
        else:
            self.books[entry.name] = self.store.close_entry(entry, "start")

    def _reopen_effects(self) -> None:
        now = boottime_ms()
        for order in self.state.stops.values():
            effect = Effect(order, now, True)
            effect.targets = {
                # What has no books may be anything: it counts under every stop, here as in `latch`.
                r.name for r in self.runs.values() if r.name not in self.books or order.scope.matches(r.entry.labels)
            }
            self.effects[order.id] = effect

    def leftovers(self) -> list[str]:
        """Return what an earlier supervisor left and is not gone yet; nothing is admitted beside it."""
        return [r.name for r in self.runs.values() if r.swept and r.state is not State.GONE]

    def _end_aliens(self, elsewhere: Iterable[Group] = ()) -> None:
        for group in (*self.tree.groups(), *elsewhere):
            known = self.runs.get(group.id)
            if known is None or (known.state is State.GONE and group.exists()):
                entry = self.books.get(group.id) or _alien(group, self.node, self.boot_id)
                run = Run(entry, State.ADMITTED, Target(group), swept=True)
                self.runs[group.id] = run
                self.end(run, "start")

    # -- stops and resumes ------------------------------------------------------------------------------

    def take(self, signed: Signed) -> tuple[str, bool]:
        """Apply a signed stop, resume or break-glass order; return its id and whether it changed anything.

        Raises Untrusted, Denied, Conflict, Malformed; Unavailable when a resume cannot be made durable.
        """
        kind = kind_of(signed)
        with self.lock:
            if kind == "stop":
                order = verify_stop(signed, self.trust, self.host)
                local = not signers(signed, self.trust.stop_keys if self.trust else {})
                return order.id, self.latch(order, signed, local=local)
            if kind == "break-glass":
                minted = use_break_glass(signed, self.trust, self.node, self.state.top)
                return minted.id, self._latch_own(minted)
            return self._resume(signed)

    def stop_here(self, words: str, reason: str, id_: str | None = None) -> str:
        """Make a local stop of ``everything`` (this node) or ``run:ID``; return its id."""
        with self.lock:
            scope = local_scope(Scope.parse(words), self.node)
            order = StopOrder(
                id_ or new_id("stop"), scope, Mode.KILL, self.state.top, f"local@{self.node}", reason[:1000]
            )
            self._latch_own(order)
            return order.id

    def _latch_own(self, order: StopOrder) -> bool:
        if order.id in self.state.cleared or order.id in self.state.stops:
            return False
        return self.latch(order, sign(STOP, order.as_json(), self.store.key), local=True)

    def latch(self, order: StopOrder, signed: Signed | None, *, local: bool) -> bool:
        """Put a verified stop in force: durable, then state, page and runs. Return whether it was new."""
        with self.lock:
            if order.id in self.state.cleared or order.id in self.state.stops:
                return False
            now = boottime_ms()
            item = Latched(order, signed, local, self.boot_id, now)
            durable = self._make_durable(item)
            self.state.apply_stop(order)
            self.latched.append(item)
            self.publish()
            effect = Effect(order, now, durable)
            self.effects[order.id] = effect
            self._end_aliens()
            for run in list(self.runs.values()):
                # What is in the tree without books may be anything, so it falls under every stop.
                if run.state is not State.GONE and (run.swept or order.scope.matches(run.entry.labels)):
                    effect.targets.add(run.name)
                    self.end(run, f"order:{order.id}")
            self._settle(effect, now)
            self.wake.set()
            return True

    def _make_durable(self, item: Latched) -> bool:
        try:
            self.store.book.latch_stop(item)
        except OSError:
            # The stop still takes effect, is never confirmed, and after a restart nothing is admitted.
            self.store.forget_complete()
            return False
        return True

    def _latch_again(self) -> None:
        """Try once more to make durable what a full disk did not take."""
        for item in self.latched:
            effect = self.effects.get(item.order.id)
            if effect is not None and not effect.durable and item.order.id in self.state.stops:
                effect.durable = self._make_durable(item)

    def _resume(self, signed: Signed) -> tuple[str, bool]:
        everyone = [e.labels for e in self.books.values()]
        order = verify_resume(signed, self.trust, self.state.stops, everyone)
        if set(order.clears) <= self.state.cleared:
            return order.id, False
        self._cool(order)
        item = Latched(order, signed, True, self.boot_id, boottime_ms())
        try:
            self.store.book.latch_resume(item)
        except OSError as error:
            raise Unavailable(f"the resume cannot be kept: {error.strerror}", code="disk",
                              next_step="make room on the state's disk; everything stays stopped") from None
        self.state.apply_resume(order)
        self.latched.append(item)
        latch.retire(self.store.latch, self.node, frozenset(order.clears))
        self.publish()
        self.wake.set()
        return order.id, True

    def _cool(self, order: ResumeOrder) -> None:
        """Refuse a resume before the cool-down of each stop is over (BOOTTIME; after a boot, since then)."""
        if self.trust is None:
            return
        now = boottime_ms()
        for item in self.latched:
            if item.order.id in order.clears and item.order.id in self.state.stops:
                age = now - item.at_ms if item.boot_id == self.boot_id else now
                if age < self.trust.cooldown_ms:
                    raise Denied("the cool-down of this stop is not over", code="cooldown",
                                 next_step="bring the same resume again later",
                                 details={"wait_ms": self.trust.cooldown_ms - age})

    # -- runs -----------------------------------------------------------------------------------------------

    def run(self, name: str) -> Run:
        """Return the attempt ``RUN.ATTEMPT``; raises NotFound."""
        found = self.runs.get(name)
        if found is None:
            raise NotFound(f"no attempt {name} is on the books here", code="run")
        return found

    def end(self, run: Run, why: str) -> None:
        """Start killing a run, once; a thread of its own goes on until proof."""
        if run.begin_end(why):
            self._start_killing(run)

    def _start_killing(self, run: Run) -> None:
        thread = threading.Thread(target=self._kill, args=(run,), daemon=True, name=f"kill-{run.name}")
        try:
            thread.start()
        except RuntimeError:  # no thread to be had: strike at once, `tick` tries again
            strike(run.target)
            run.missing = "thread"

    def _kill(self, run: Run) -> None:
        while True:
            try:
                outcome = climb(run.target, removed=run.removed or self.store.was_removed(run.name))
            except Exception as error:  # the killing must not end by an accident of ours
                outcome = Outcome(Result.NOT_CONFIRMED, 0, (), f"error {type(error).__name__}", False)
            with self.lock:
                run.removed = run.removed or outcome.removed
                run.survivors, run.missing = outcome.survivors, outcome.why
                run.lost = outcome.result is not Result.CONFIRMED
                if not run.lost:
                    run.finish()
                    self.books[run.name] = self.store.close_entry(run.entry, run.why)
                self._settle_all()
                self.changed.notify_all()
                if not run.lost:
                    return
            time.sleep(_RETRY_S)

    def await_gone(self, run: Run) -> Result:
        """Wait for the proof, at most the ladder's limit; raises nothing."""
        with self.lock:
            self.changed.wait_for(lambda: run.state is State.GONE or run.lost, (LIMIT_MS + 500) / 1000)
            return Result.CONFIRMED if run.state is State.GONE else Result.NOT_CONFIRMED

    # -- time ------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at deadlines, dead inits, effects, the latch folder; keep the stop page fresh."""
        with self.lock:
            now = boottime_ms()
            for run in list(self.runs.values()):
                self._watch(run, now)
            self._settle_all()
            if now - self._looked_ms >= LOOK_MS:
                self.look()
            if now - self._paged_ms >= PAGE_MS:
                self.publish()

    def _watch(self, run: Run, now: int) -> None:
        if run.state is State.KILLING and run.missing == "thread":
            run.missing = ""
            self._start_killing(run)
        if not run.waits or run.leash is None:
            return
        before = run.leash.deadline_ms
        deadline = run.leash.roll(now)
        if now >= deadline:
            self.end(run, "lease")
        elif run.target.pidfd is not None and exited(run.target.pidfd):
            self.end(run, "ended")
        elif deadline != before and run.page is not None:
            run.page.set(deadline)

    def look(self) -> None:
        """Look at the latch folder, at groups that nobody admitted, and for a first trust list."""
        with self.lock:
            self._looked_ms = boottime_ms()
            if self.trust is None:
                self._take_first_trust()
            for file in latch.look(self.store.latch, self.node):
                self.stop_here(str(file.scope), f"latch file {file.path.name}", file.id)
            self._end_aliens()
            self._latch_again()
            gone = [n for n, r in self.runs.items() if r.state is State.GONE]
            for name in gone[:-_KEPT_GONE]:
                del self.runs[name]

    def _take_first_trust(self) -> None:
        with suppress(Refusal, OSError):
            self.trust = load(self.store.folder / "trust.json")
        if self.trust is not None:  # what was stopped before the join had no node's name yet
            for order in list(self.state.stops.values()):
                if order.scope == Scope(ScopeKind.NODE, UNJOINED):
                    self._latch_own(replace(order, id=new_id("stop"), scope=Scope(ScopeKind.NODE, self.node)))

    def publish(self) -> None:
        """Write the stop page now; what cannot be published closes every reader."""
        self._paged_ms = boottime_ms()
        self.page.write(self.state)

    def _settle_all(self) -> None:
        now = boottime_ms()
        for effect in self.effects.values():
            self._settle(effect, now)

    def _settle(self, effect: Effect, now: int) -> None:
        if not effect.settle(self.runs, now):
            return
        self.wake.set()
        if effect.result is Result.NOT_CONFIRMED and not effect.alarmed:
            effect.alarmed = True
            alarm.call_out(self.hook, {"node": self.node, **effect.as_json()})

    # -- end -------------------------------------------------------------------------------------------------

    def close(self, pause: Callable[[], None] = lambda: None) -> None:
        """End every run, take the tree away and give the lock back; leases do not outlive this program."""
        with self.lock:
            self.ending = True
            for run in list(self.runs.values()):
                self.end(run, "pipe")
            self.changed.wait_for(
                lambda: all(r.state is State.GONE for r in self.runs.values()), LIMIT_MS / 1000
            )
        with suppress(OSError):
            self.tree.remove()
        pause()
        self.store.close()


def _alien(group: Group, node: str, boot: str) -> Entry:
    """Return books for a group that has none; its labels match every stop of the node, and its name."""
    run, _, attempt = group.id.rpartition(".")
    labels = Labels("unknown", "unknown", "unknown", run or group.id, node, Tier.CRITICAL)
    return Entry(run or group.id, int(attempt) if attempt.isdigit() else 0, labels, 0, boot, group.paths)


def refuse_leftovers(supervisor: Supervisor) -> None:
    """Raise Conflict (``conflict.leftover``) while something of an earlier supervisor still lives, Unavailable
    once this one is ending: what it admitted now nobody would watch."""
    if supervisor.ending:
        raise Unavailable("the supervisor is ending", code="supervisor", next_step="start it again, then try again")
    left = supervisor.leftovers()
    if left:
        raise Conflict(f"{left[0]} of an earlier supervisor still lives", code="leftover",
                       next_step="see `status`; fence this node if it does not end", details={"runs": left[:20]})
