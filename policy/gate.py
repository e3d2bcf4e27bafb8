"""The one door: stopped? → decide → record durably → permit. Nobody else makes a permit.

A failure of any of the four questions is a no: an unreadable stop state counts as stopped, a fault in deciding
as a denial, a record that is not durable as no permit. Govern actions skip the stop question, since a stop must
never keep people from looking, approving or resuming. Stopping itself does not pass here at all.
"""

from collections.abc import Callable

from interlock.call import Call, Decision, Effect, Kind
from interlock.errors import ApprovalRequired, Denied, Halted, NotRecorded, Refusal, Stale, StepUpRequired
from interlock.event import Event, EventType, Written
from interlock.order import StopOrder
from interlock.permit import MAX_LIFE_MS, Permit, boottime_ms, issue
from interlock.tier import PROFILES
from policy.decide import ALWAYS_OPEN
from policy.facts import Facts


class Gate:
    """Asks the four questions in order. Thread-safe when its callables are.

    Args: `decide` the whole decision (`policy.rbac.Engine.decide`, or a partial of `policy.decide.decide`);
    `stopped` the stop order that covers a call, or None, never asked for govern; `record` returns only when the
    event is durable; `epoch` the present stop epoch.
    """

    def __init__(
        self, decide: Callable[[Call, Facts], Decision], stopped: Callable[[Call], StopOrder | None],
        record: Callable[[Event], Written], epoch: Callable[[], int],
    ) -> None:
        self._decide, self._stopped, self._record, self._epoch = decide, stopped, record, epoch

    def ask(self, call: Call, facts: Facts, life_ms: int = MAX_LIFE_MS) -> Permit:
        """Return a permit for `call`, or raise the typed refusal.

        Args: `life_ms` at most 5000, counted from this question, not from the answer.
        Raises Halted, Denied, StepUpRequired, ApprovalRequired, Stale, NotRecorded.
        """
        asked_ms = boottime_ms()
        if call.action.kind not in (Kind.WORK, Kind.GOVERN):
            raise Denied("a stop does not pass the gate", code="stop_elsewhere", next_step="use interlock stop")
        # Read before the stop question: a stop that comes in between raises the epoch and voids the permit.
        epoch = self._read_epoch(call)
        if call.action.kind is Kind.WORK:
            self._refuse_when_stopped(call, facts)
        decision = self._decided(call, facts)
        event = decision_event(call, facts, decision, epoch)
        if not decision.allowed:
            self._note(event)
            raise refusal(call, facts, decision)
        written = self._durable(event)
        return issue(
            call=call.digest(), action=call.action, resource=call.resource.path, run=call.run,
            expires_ms=asked_ms + max(0, min(life_ms, MAX_LIFE_MS)), epoch=epoch, record=written.event_id,
        )

    def _read_epoch(self, call: Call) -> int:
        try:
            return self._epoch()
        except Exception:
            if call.action.kind is Kind.GOVERN:
                return 0
            raise _unreadable() from None

    def _refuse_when_stopped(self, call: Call, facts: Facts) -> None:
        try:
            order = self._stopped(call)
        except Exception:
            raise _unreadable() from None
        if order is None:
            return
        self._note(decision_event(call, facts, _halted_decision(order), order.epoch))
        raise Halted(
            f"stopped by {order.actor}: {order.reason or 'no reason given'}",
            next_step="two safety officers can lift this very stop with interlock resume",
            details={"order": order.id, "scope": str(order.scope), "actor": order.actor, "call": call.id},
        )

    def _decided(self, call: Call, facts: Facts) -> Decision:
        if call.action not in ALWAYS_OPEN and not 0 <= facts.bundle_age_ms <= PROFILES[call.resource.tier].absent_ms:
            return Decision(
                Effect.DENY, "stale", f"policy was last confirmed {facts.bundle_age_ms} ms ago, too long for tier "
                f"{call.resource.tier.value}", next_step="restore the connection to the control plane",
            )
        try:
            decision = self._decide(call, facts)
        except Exception as fault:
            return _fault(type(fault).__name__)
        return decision if isinstance(decision, Decision) else _fault("no decision")

    def _durable(self, event: Event) -> Written:
        try:
            written = self._record(event)
        except NotRecorded:
            raise
        except Exception as fault:
            raise _not_recorded(type(fault).__name__) from None
        if not isinstance(written, Written) or written.event_id != event.id:
            raise _not_recorded("another record came back")
        return written

    def _note(self, event: Event) -> None:
        """Record a denial. It stays a denial when that fails: the caller gets nothing either way."""
        try:
            self._record(event)
        except Exception:
            return


def decision_event(call: Call, facts: Facts, decision: Decision, epoch: int) -> Event:
    """Return the record of one decision: call, facts as read, rules, bundle; enough to decide it again."""
    return Event(
        EventType.CALL_DECIDED, call.subject.id, call.subject.tenant, call.run, call.id,
        {
            "call": call.as_json(), "digest": call.digest(), "facts": facts.as_json(),
            "decision": decision.as_json(), "epoch": epoch,
        },
    )


def refusal(call: Call, facts: Facts, decision: Decision) -> Refusal:
    """Return the typed refusal for a decision that is no allow."""
    details = {"call": call.id, "rules": list(decision.rules), "bundle": decision.bundle, "bound": call.bound}
    words, step = decision.message, decision.next_step
    match decision.code:
        case "step_up":
            return StepUpRequired(words, next_step=step, details={**details, "action": call.action.value})
        case "approval":
            count = {"needed": decision.needs + max(0, facts.approvals), "given": max(0, facts.approvals)}
            return ApprovalRequired(words, next_step=step, details={**details, **count})
        case "stale":
            return Stale(words, next_step=step, details=details)
    return Denied(words, code=decision.code, next_step=step, details=details)


def _halted_decision(order: StopOrder) -> Decision:
    return Decision(Effect.DENY, "stopped", f"stop order {order.id} covers this", (f"stop:{order.id}",))


def _fault(what: str) -> Decision:
    return Decision(Effect.DENY, "error", f"the policy could not be evaluated ({what})",
                    next_step="tell an administrator")


def _unreadable() -> Halted:
    return Halted("the stop state cannot be read, which counts as stopped", code="unreadable",
                  next_step="check the kill supervisor with python -I -m killswitch status")


def _not_recorded(what: str) -> NotRecorded:
    return NotRecorded(f"the decision could not be recorded durably ({what}), so nothing is permitted",
                       next_step="check disk space and the spool or ledger")
