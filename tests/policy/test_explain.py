"""Why, and the nearest change; each named change really flips the answer."""

from collections.abc import Callable

from interlock.call import Action
from interlock.tier import Tier
from policy.explain import explain
from policy.facts import Facts
from policy.rbac import Engine
from tests.policy.conftest import FEW, call

RESEARCHER = Facts(frozenset({"researcher"}))


def test_an_allow_names_its_rule(example: Engine) -> None:
    found = explain(example, call(), RESEARCHER)
    assert found.decision.allowed
    assert found.rules[0].endswith("p, researcher, same, */*, launch, none, -, allow")
    assert found.changes == ()


def test_one_change_that_flips(example: Engine) -> None:
    found = explain(example, call(tier=Tier.HIGH), RESEARCHER)
    assert [c.what for c in found.changes] == ["give a second factor"]
    found = explain(example, call(), Facts())
    assert [(c.what, c.who) for c in found.changes] == [("the role researcher", "an administrator")]


def test_two_changes_that_flip_together(example: Engine) -> None:
    found = explain(example, call(tier=Tier.CRITICAL, bound="sha256:x"), RESEARCHER)
    assert [c.what for c in found.changes] == ["give a second factor for exactly this plan", "2 more approvals"]
    assert found.as_json()["changes"][1]["who"] == "safety officers"


def test_a_deny_is_flipped_by_its_authors_only(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, researcher, *, */*, launch, *, -, deny\n")
    found = explain(one, call(), RESEARCHER)
    assert found.decision.code == "deny_rule"
    assert "policy.csv:3" in found.changes[0].what


def test_a_programme_and_an_owner(engine: Callable[..., Engine]) -> None:
    one = engine(
        FEW + "p, researcher, same, model/m, infer, critical, programme:vetted, allow\n"
        "p, everyone, same, run/*, look, none, own, allow\n"
    )
    wanted = call(Action.INFER, Tier.CRITICAL, kind="model", name="m")
    assert explain(one, wanted, RESEARCHER).changes[0].what == "membership of the programme vetted"
    found = explain(one, call(Action.LOOK, kind="run"), RESEARCHER)
    assert found.changes[0].what in ("be the owner", "the role on_call")


def test_without_a_bundle_somebody_publishes_one() -> None:
    assert explain(None, call(), RESEARCHER).changes[0].what == "publish a policy bundle"


def test_what_no_fact_can_flip_has_no_change(engine: Callable[..., Engine]) -> None:
    assert explain(engine(), call(Action.DESTROY_KEY), RESEARCHER).changes == ()
