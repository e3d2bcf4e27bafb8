"""stopped? → decide → record → permit: the order, and what a failure of each question means."""

from dataclasses import replace

import pytest

from interlock.call import Action, Call, Decision, Effect
from interlock.errors import ApprovalRequired, Denied, Halted, NotRecorded, Stale, StepUpRequired, Untrusted
from interlock.event import Event, EventType, Written
from interlock.order import Mode, Scope, ScopeKind, StopOrder
from interlock.permit import boottime_ms
from interlock.tier import PROFILES, Tier
from policy.facts import Facts
from policy.gate import Gate
from policy.rbac import Engine
from tests.policy.conftest import call

FACTS = Facts(frozenset({"researcher"}), bundle_age_ms=0)
STOP = StopOrder("a" * 32, Scope(ScopeKind.EVERYTHING), Mode.KILL, 7, "per_oncall", "drill")
YES, NO = Decision(Effect.ALLOW, "allowed", "allowed"), Decision(Effect.DENY, "no_match", "no rule")


class Site:
    """The four answers of a site, each settable, with the order in which they were asked for."""

    def __init__(self, decision: Decision | Exception = YES) -> None:
        self.decision, self.order, self.epoch = decision, None, 3
        self.recording: Exception | None = None
        self.stop_fault: Exception | None = None
        self.asked: list[str] = []
        self.events: list[Event] = []

    def decide(self, call: Call, facts: Facts) -> Decision:
        self.asked.append("decide")
        if isinstance(self.decision, Exception):
            raise self.decision
        return self.decision

    def stopped(self, call: Call) -> StopOrder | None:
        self.asked.append("stopped")
        if self.stop_fault:
            raise self.stop_fault
        return self.order

    def record(self, event: Event) -> Written:
        self.asked.append("record")
        if self.recording:
            raise self.recording
        self.events.append(event)
        return Written(event.id, "test", len(self.events))

    def read_epoch(self) -> int:
        self.asked.append("epoch")
        return self.epoch

    @property
    def gate(self) -> Gate:
        return Gate(self.decide, self.stopped, self.record, self.read_epoch)


def test_asks_in_order_and_permits_what_was_recorded() -> None:
    site, wanted = Site(), call(bound="sha256:x")
    permit = site.gate.ask(wanted, FACTS)
    assert site.asked == ["epoch", "stopped", "decide", "record"]
    (event,) = site.events
    assert (permit.record, permit.call, permit.action) == (event.id, wanted.digest(), Action.LAUNCH)
    assert (permit.epoch, permit.resource, permit.run) == (3, "pool/default", "")
    assert event.type is EventType.CALL_DECIDED
    assert event.facts["facts"]["roles"] == ["researcher"]
    assert event.facts["decision"]["code"] == "allowed"
    assert event.canonical()
    permit.check(Action.LAUNCH, "pool/default", epoch=3)


def test_refuses_when_stopped() -> None:
    site = Site()
    site.order = STOP
    with pytest.raises(Halted) as caught:
        site.gate.ask(call(), FACTS)
    assert caught.value.code == "stopped"
    assert caught.value.details["order"] == STOP.id
    assert "decide" not in site.asked
    assert site.events[0].facts["decision"]["code"] == "stopped"
    site.order = None
    assert site.gate.ask(call(), FACTS)


@pytest.mark.parametrize("action", [Action.LOOK, Action.APPROVE, Action.RESUME, Action.PUBLISH_BUNDLE])
def test_govern_goes_on_while_stopped(action: Action) -> None:
    site = Site()
    site.order = STOP
    assert site.gate.ask(call(action), FACTS).action is action
    assert "stopped" not in site.asked


def test_refuses_when_stop_state_is_unreadable() -> None:
    site = Site()
    site.stop_fault = OSError("page gone")
    with pytest.raises(Halted) as caught:
        site.gate.ask(call(), FACTS)
    assert caught.value.code == "stopped.unreadable"
    assert site.gate.ask(call(Action.LOOK), FACTS)


def test_refuses_when_epoch_is_unreadable(monkeypatch: pytest.MonkeyPatch) -> None:
    site = Site()

    def fail() -> int:
        raise OSError

    monkeypatch.setattr(site, "read_epoch", fail)
    with pytest.raises(Halted):
        site.gate.ask(call(), FACTS)
    assert site.gate.ask(call(Action.RESUME), FACTS).epoch == 0


def test_a_stop_between_question_and_effect_voids_the_permit() -> None:
    site = Site()

    def stop_comes_late(call: Call) -> None:
        site.epoch += 1

    gate = Gate(site.decide, stop_comes_late, site.record, site.read_epoch)
    permit = gate.ask(call(), FACTS)
    with pytest.raises(Halted):
        permit.check(Action.LAUNCH, "pool/default", epoch=site.epoch)


def test_refuses_when_decision_is_no_and_records_it() -> None:
    site = Site(NO)
    with pytest.raises(Denied) as caught:
        site.gate.ask(call(), FACTS)
    assert caught.value.code == "denied.no_match"
    assert site.events[0].facts["decision"]["effect"] == "deny"


@pytest.mark.parametrize("recording", [OSError(28, "no space"), NotRecorded("full"), RuntimeError("x")])
def test_refuses_when_the_record_fails(recording: Exception) -> None:
    site = Site()
    site.recording = recording
    with pytest.raises(NotRecorded) as caught:
        site.gate.ask(call(), FACTS)
    assert caught.value.code == "not_recorded"
    site.recording = None
    assert site.gate.ask(call(), FACTS)


def test_a_denial_stays_a_denial_when_its_record_fails() -> None:
    site = Site(NO)
    site.recording = OSError(28, "no space")
    with pytest.raises(Denied):
        site.gate.ask(call(), FACTS)
    site.order = STOP
    with pytest.raises(Halted):
        site.gate.ask(call(), FACTS)


def test_refuses_when_another_record_comes_back() -> None:
    site = Site()
    gate = Gate(site.decide, site.stopped, lambda _: Written("other", "test", 1), site.read_epoch)
    with pytest.raises(NotRecorded):
        gate.ask(call(), FACTS)
    odd = Gate(site.decide, site.stopped, lambda _: None, site.read_epoch)  # type: ignore[arg-type,return-value]
    with pytest.raises(NotRecorded):
        odd.ask(call(), FACTS)


@pytest.mark.parametrize("decision", [ValueError("x"), None, True, "allow"])
def test_refuses_when_deciding_fails(decision: object) -> None:
    site = Site()
    site.decision = decision  # type: ignore[assignment]
    with pytest.raises(Denied) as caught:
        site.gate.ask(call(), FACTS)
    assert caught.value.code == "denied.error"
    assert len(site.events) == 1


@pytest.mark.parametrize("tier", list(Tier))
def test_refuses_when_bundle_is_too_old_for_the_tier(tier: Tier) -> None:
    site, limit = Site(), PROFILES[tier].absent_ms
    for age in (limit + 1, -1):
        with pytest.raises(Stale) as caught:
            site.gate.ask(call(tier=tier), replace(FACTS, bundle_age_ms=age))
        assert caught.value.code == "stale"
    assert site.asked.count("decide") == 0
    assert len(site.events) == 2
    assert site.gate.ask(call(tier=tier), replace(FACTS, bundle_age_ms=limit))
    assert site.gate.ask(call(Action.SIGN_IN, tier), replace(FACTS, bundle_age_ms=limit + 1))


def test_refuses_when_a_stop_comes_through_the_gate() -> None:
    site = Site()
    with pytest.raises(Denied) as caught:
        site.gate.ask(call(Action.STOP), FACTS)
    assert caught.value.code == "denied.stop_elsewhere"
    assert site.asked == []


@pytest.mark.parametrize(("life", "most"), [(5_000, 5_000), (60_000, 5_000), (10, 10), (-4, 0)])
def test_a_permit_lives_five_seconds_at_most(life: int, most: int) -> None:
    before = boottime_ms()
    permit = Site().gate.ask(call(), FACTS, life)
    assert before + most <= permit.expires_ms <= boottime_ms() + most
    with pytest.raises(Untrusted):
        permit.check(Action.LAUNCH, "pool/default", epoch=3, now_ms=permit.expires_ms)


def test_life_counts_from_the_question() -> None:
    site = Site()
    start = boottime_ms()

    def slow(event: Event) -> Written:
        while boottime_ms() < start + 30:
            pass
        return site.record(event)

    permit = Gate(site.decide, site.stopped, slow, site.read_epoch).ask(call(), FACTS, 1_000)
    assert permit.expires_ms < start + 1_025


def test_refusals_say_what_is_missing(example: Engine) -> None:
    site = Site()
    gate = Gate(example.decide, site.stopped, site.record, site.read_epoch)
    with pytest.raises(StepUpRequired) as step:
        gate.ask(call(tier=Tier.HIGH), FACTS)
    assert step.value.code == "step_up_required"
    assert step.value.details["action"] == "launch"
    plan = "sha256:plan"
    one = replace(FACTS, mfa_age_ms=0, mfa_bound=plan, approvals=1)
    with pytest.raises(ApprovalRequired) as person:
        gate.ask(call(tier=Tier.CRITICAL, bound=plan), one)
    assert person.value.code == "approval_required"
    assert (person.value.details["needed"], person.value.details["given"]) == (2, 1)
    assert gate.ask(call(tier=Tier.CRITICAL, bound=plan), replace(one, approvals=2))
    assert len(site.events) == 3


def test_refuses_when_nobody_said_how_old_the_policy_is() -> None:
    """What is left out of the facts is never fresh."""
    site = Site()
    assert site.gate.ask(call(), FACTS)
    with pytest.raises(Stale):
        site.gate.ask(call(), Facts(frozenset({"researcher"})))
