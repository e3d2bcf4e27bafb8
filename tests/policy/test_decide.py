"""The order of a decision: open actions, bootstrap, deny, first steps, rules, tier, factor, persons."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from interlock.call import Action, Call, Effect, Kind
from interlock.tier import Tier
from policy import capability, stepup
from policy.decide import ALWAYS_OPEN, Verdict, decide
from policy.facts import FRESH_MS, Facts
from policy.rbac import Engine
from policy.rules import Rule
from tests.policy.conftest import FEW, call

PLAN = "sha256:plan"


def facts(role: str = "researcher", **more: object) -> Facts:
    return Facts(frozenset({role}), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("action", [a for a in Action if a not in ALWAYS_OPEN])
def test_refuses_when_there_is_no_bundle(action: Action) -> None:
    everything = Facts(
        frozenset({"researcher", "safety_officer", "on_call", "auditor"}), 0, PLAN, 9, frozenset({"vetted"}), own=True
    )
    assert not decide(None, call(action, bound=PLAN), everything).allowed
    for action_open in ALWAYS_OPEN:
        assert decide(None, call(action_open), Facts()).allowed


def test_refuses_when_no_bundle_except_publishing_one_by_an_administrator() -> None:
    admin = facts("administrator")
    assert decide(None, call(Action.PUBLISH_BUNDLE), admin).allowed
    assert not decide(None, call(Action.PUBLISH_BUNDLE), facts("researcher")).allowed
    assert decide(None, call(Action.INVITE), admin).code == "no_bundle"


def test_bootstrap_lets_an_administrator_begin_and_never_approve(example: Engine) -> None:
    for engine in (None, example):
        admin = facts("administrator", state="bootstrap")
        for action in (Action.INVITE, Action.JOIN_NODE, Action.PUBLISH_BUNDLE, Action.LOOK):
            assert decide(engine, call(action), admin).allowed
            assert not decide(engine, call(action), Facts(state="bootstrap")).allowed
        for action in (Action.APPROVE, Action.RESUME):
            both = Facts(frozenset({"administrator", "safety_officer"}), state="bootstrap")
            assert decide(engine, call(action), both).code == "bootstrap"
        assert not decide(engine, call(Action.LAUNCH), admin).allowed
        assert not decide(engine, call(Action.MINT_KEY), Facts(state="bootstrap")).allowed


def test_refuses_when_an_administrator_collects_the_office_of_an_approver(example: Engine) -> None:
    both = Facts(frozenset({"administrator", "safety_officer"}))
    for action in (Action.APPROVE, Action.RESUME):
        assert example.decide(call(action), both).code == "deny_rule"
        assert example.decide(call(action), facts("safety_officer")).allowed


def test_a_deny_rule_wins_over_the_first_steps(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, administrator, *, */*, invite, *, -, deny\n")
    assert one.decide(call(Action.INVITE), facts("administrator", state="bootstrap")).code == "deny_rule"
    assert one.decide(call(Action.JOIN_NODE), facts("administrator", state="bootstrap")).allowed


class Broken:
    """An engine whose evaluation fails."""

    digest, live = "sha256:x", True

    def match(self, call: Call, facts: Facts) -> Verdict:
        raise RecursionError


def test_refuses_when_evaluation_fails() -> None:
    found = decide(Broken(), call(), facts())
    assert (found.allowed, found.code) == (False, "error")
    assert decide(Broken(), call(Action.SIGN_IN), Facts()).allowed


@pytest.mark.parametrize("age", [None, -1, FRESH_MS + 1])
def test_refuses_when_high_launch_lacks_a_fresh_factor(age: int | None, example: Engine) -> None:
    found = example.decide(call(tier=Tier.HIGH), facts(mfa_age_ms=age))
    assert found.code == "step_up"
    assert found.next_step
    for fresh in (0, FRESH_MS):
        assert example.decide(call(tier=Tier.HIGH), facts(mfa_age_ms=fresh)).allowed


def test_refuses_when_critical_factor_is_for_another_plan(example: Engine) -> None:
    wanted = call(tier=Tier.CRITICAL, bound=PLAN)
    for bound in ("", "sha256:other"):
        assert example.decide(wanted, facts(mfa_age_ms=0, mfa_bound=bound, approvals=2)).code == "step_up"
    nothing = call(tier=Tier.CRITICAL, bound="")
    assert example.decide(nothing, facts(mfa_age_ms=0, mfa_bound="", approvals=2)).code == "step_up"
    assert example.decide(wanted, facts(mfa_age_ms=0, mfa_bound=PLAN, approvals=2)).allowed


@pytest.mark.parametrize(("given", "needs"), [(-5, 2), (0, 2), (1, 1)])
def test_refuses_when_critical_launch_lacks_persons(given: int, needs: int, example: Engine) -> None:
    found = example.decide(call(tier=Tier.CRITICAL, bound=PLAN), facts(mfa_age_ms=0, mfa_bound=PLAN, approvals=given))
    assert (found.code, found.needs) == ("approval", needs)


LAX = FEW + "p, researcher, same, pool/*, restart, critical, -, allow\n"


def test_obligations_hold_whatever_the_bundle_says() -> None:
    """A bundle that asks for nothing still gets the tier's factor and persons (the static check would refuse it)."""
    wanted = call(tier=Tier.CRITICAL, bound=PLAN)
    assert stepup.missing(wanted, facts()) == stepup.factor(bound=True)
    assert stepup.missing(wanted, facts(mfa_age_ms=0, mfa_bound=PLAN)) == stepup.persons(2)
    assert stepup.missing(wanted, facts(mfa_age_ms=0, mfa_bound=PLAN, approvals=1)) == stepup.persons(1)
    assert stepup.missing(wanted, facts(mfa_age_ms=0, mfa_bound=PLAN, approvals=2)) is None


def test_obligations_hold_high() -> None:
    wanted = call(Action.EXPORT_WEIGHTS, tier=Tier.HIGH)
    assert stepup.missing(wanted, facts(approvals=1)) == stepup.factor(bound=False)
    assert stepup.missing(wanted, facts(mfa_age_ms=0)) == stepup.persons(1)
    assert stepup.missing(wanted, facts(mfa_age_ms=0, approvals=1)) is None


@pytest.mark.parametrize(("action", "tier", "expected"), [
    (Action.LAUNCH, Tier.NONE, stepup.Obligation()),
    (Action.LAUNCH, Tier.HIGH, stepup.Obligation(True, False, 0)),
    (Action.LAUNCH, Tier.CRITICAL, stepup.Obligation(True, True, 2)),
    (Action.SERVE, Tier.CRITICAL, stepup.Obligation(True, True, 2)),
    (Action.EXPORT_WEIGHTS, Tier.NONE, stepup.Obligation()),
    (Action.EXPORT_WEIGHTS, Tier.HIGH, stepup.Obligation(True, False, 1)),
    (Action.EXPORT_WEIGHTS, Tier.CRITICAL, stepup.Obligation(True, True, 2)),
    (Action.CHANGE_TIER, Tier.NONE, stepup.Obligation(True, True, 2)),
    (Action.DESTROY_KEY, Tier.NONE, stepup.Obligation(True, True, 2)),
    (Action.RESTART, Tier.CRITICAL, stepup.Obligation()),
    (Action.INFER, Tier.CRITICAL, stepup.Obligation()),
    (Action.LOOK, Tier.CRITICAL, stepup.Obligation()),
])
def test_obligations_by_tier(action: Action, tier: Tier, expected: stepup.Obligation) -> None:
    assert stepup.obligation(call(action, tier)) == expected


def test_a_restart_inside_an_approved_plan_needs_no_new_person(engine: Callable[..., Engine]) -> None:
    assert engine(LAX).decide(call(Action.RESTART, Tier.CRITICAL), facts()).allowed


def test_refuses_when_critical_is_opened_by_a_wildcard_only(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, researcher, same, */*, restart, *, -, allow\n")
    assert one.decide(call(Action.RESTART, Tier.HIGH), facts()).allowed
    assert one.decide(call(Action.RESTART, Tier.CRITICAL), facts()).code == "no_match"


def test_closed_actions_are_all_work() -> None:
    assert {a for a in Action if a.kind is Kind.WORK} <= capability.CLOSED
    assert Action.LOOK not in capability.CLOSED


def test_refuses_when_critical_inference_lacks_the_programme(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, researcher, same, model/m, infer, critical, programme:vetted, allow\n")
    wanted = call(Action.INFER, Tier.CRITICAL, kind="model", name="m")
    found = one.decide(wanted, facts())
    assert found.code == "no_match"
    assert "vetted" in found.message
    assert one.decide(wanted, facts(programmes=frozenset({"other"}))).code == "no_match"
    assert one.decide(wanted, facts(programmes=frozenset({"vetted"}))).allowed


def test_the_rule_that_lacks_the_least_is_named(engine: Callable[..., Engine]) -> None:
    one = engine(
        FEW + "p, auditor, same, pool/*, look, none, programme:x, allow\n"
        "p, auditor, same, pool/*, look, none, mfa+two_persons, allow\n"
        "p, auditor, same, pool/*, look, none, mfa, allow\n"
    )
    found = one.decide(call(Action.LOOK), facts("auditor"))
    assert (found.code, found.rules) == ("step_up", ("policy.csv:5",))
    two = engine(FEW + "p, auditor, same, pool/*, look, none, two_persons, allow\n")
    found = two.decide(call(Action.LOOK), facts("auditor", approvals=1))
    assert (found.code, found.needs) == ("approval", 1)


def test_refuses_when_role_is_missing(example: Engine) -> None:
    found = example.decide(call(), Facts())
    assert found.code == "no_match"
    assert found.bundle == example.digest
    assert example.decide(call(), facts()).allowed


def test_refuses_when_a_rule_for_critical_inference_names_no_programme() -> None:
    wanted = call(Action.INFER, Tier.CRITICAL, kind="model", name="m")
    bare = Rule(1, "researcher", "same", "model/*", "infer", "critical", frozenset(), Effect.ALLOW)
    assert not capability.opens(bare, wanted)
    assert capability.opens(replace(bare, conditions=frozenset({"programme:vetted"})), wanted)
    assert capability.opens(bare, call(Action.INFER, Tier.HIGH, kind="model", name="m"))
