"""Casbin's traps, each with what happens here instead; threads; roles and tenants."""

import threading
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError

import pytest

from interlock.call import Action, Resource, Subject
from interlock.errors import Malformed, Untrusted
from interlock.tier import Tier
from policy import rbac
from policy.bundle import Bundle
from policy.facts import Facts
from policy.rbac import Engine
from tests.policy.conftest import FEW, NOW, call

RESEARCHER = Facts(frozenset({"researcher"}))


def test_T1_without_a_matching_rule_the_answer_is_no(engine: Callable[..., Engine]) -> None:
    one = engine("p, auditor, same, pool/other, look, none, -, deny\n")
    assert one.decide(call(Action.LOOK), RESEARCHER).code == "no_match"
    assert one.decide(call(Action.LAUNCH), RESEARCHER).code == "no_match"
    assert engine().decide(call(), RESEARCHER).allowed


def test_T2_refuses_when_a_field_is_empty(engine: Callable[..., Engine]) -> None:
    one = engine()
    for odd in (call(home="", tenant=""), call(name=""), call(tenant=""), call(home="")):
        assert one.decide(odd, RESEARCHER).code == "error"
    assert one.decide(call(), RESEARCHER).allowed


def test_T2_refuses_when_a_policy_is_empty(load: Callable[..., Bundle]) -> None:
    with pytest.raises(Malformed) as caught:
        Engine(load("# nothing\n"))
    assert caught.value.code == "malformed.policy_check"


def test_T7_roles_inherit_to_nine_steps_and_no_further(
    engine: Callable[..., Engine], load: Callable[..., Bundle]
) -> None:
    def chain(steps: int) -> str:
        links = "".join(f"g, r{n}, r{n + 1}\n" for n in range(steps))
        return f"p, r{steps}, same, */*, launch, none, -, allow\n{links}"

    for steps in range(10):
        assert engine(chain(steps)).decide(call(), Facts(frozenset({"r0"}))).allowed, steps
    with pytest.raises(Malformed, match="9 steps"):
        Engine(load(chain(10)))


def test_T7_inheritance_goes_one_way(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "g, lead, researcher\np, lead, same, pool/*, read_data, none, -, allow\n")
    assert one.decide(call(), Facts(frozenset({"lead"}))).allowed
    assert one.decide(call(Action.READ_DATA), Facts(frozenset({"lead"}))).allowed
    assert not one.decide(call(Action.READ_DATA), RESEARCHER).allowed


def test_T8_unknown_roles_and_tenants_leave_nothing_behind(engine: Callable[..., Engine]) -> None:
    one = engine()
    part = one._parts[Action.LAUNCH]
    assert part is not None
    before = len(part.rm_map["g"].all_roles)
    for n in range(500):
        assert not one.decide(call(tenant=f"t{n}", home=f"t{n}"), Facts(frozenset({f"nobody{n}"}))).allowed
    assert len(part.rm_map["g"].all_roles) - before <= 2


def test_T16_roles_come_from_facts_alone(engine: Callable[..., Engine]) -> None:
    one = engine()
    liar = Subject("researcher", "demo", "researcher", "researcher")
    wanted = call()
    odd = type(wanted)(wanted.action, liar, wanted.resource)
    assert one.decide(odd, Facts()).code == "no_match"
    assert one.decide(odd, RESEARCHER).allowed


def test_T17_nothing_turns_enforcement_off(engine: Callable[..., Engine]) -> None:
    one = engine()
    assert not hasattr(one, "enable_enforce")
    part = one._parts[Action.LAUNCH]
    assert part is not None
    part.enable_enforce(False)
    assert one.decide(call(), Facts()).code == "error"


def test_refuses_when_casbin_and_the_rules_disagree(
    engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = engine()
    part = one._parts[Action.LAUNCH]
    monkeypatch.setattr(part, "enforce", lambda *_: True)
    assert one.decide(call(), Facts()).code == "error"


def test_deny_wins_over_any_allow(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, everyone, *, pool/default, launch, *, -, deny\n")
    found = one.decide(call(), RESEARCHER)
    assert (found.code, found.rules) == ("deny_rule", ("policy.csv:3",))
    assert one.decide(call(name="other"), RESEARCHER).allowed


def test_deny_of_one_role_wins_over_allow_of_another(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, on_call, *, */*, launch, *, -, deny\n")
    assert one.decide(call(), RESEARCHER).allowed
    assert one.decide(call(), Facts(frozenset({"researcher", "on_call"}))).code == "deny_rule"


def test_all_deciding_rules_are_named(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, everyone, same, pool/default, launch, none, -, allow\n")
    assert one.decide(call(), RESEARCHER).rules == ("policy.csv:1", "policy.csv:3")
    two = engine(FEW + "p, everyone, same, */*, launch, *, -, deny\np, researcher, *, */*, *, none, -, deny\n")
    assert two.decide(call(), RESEARCHER).rules == ("policy.csv:3", "policy.csv:4")


def test_roles_hold_in_their_tenant_only(engine: Callable[..., Engine]) -> None:
    one = engine()
    assert one.decide(call(), RESEARCHER).allowed
    assert one.decide(call(tenant="other"), RESEARCHER).code == "no_match"
    assert one.decide(call(Action.LOOK, tenant="other"), Facts(frozenset({"on_call"}))).allowed


def test_everyone_is_whoever_is_signed_in(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, everyone, same, */*, look, *, own, allow\n")
    assert one.decide(call(Action.LOOK), Facts(own=True)).allowed
    found = one.decide(call(Action.LOOK), Facts(own=False))
    assert (found.code, found.rules) == ("no_match", ("policy.csv:3",))


@pytest.mark.parametrize("condition", ["mfa", "mfa_bound", "two_persons", "own", "programme:vetted", "mfa+own"])
def test_conditions_hold_by_facts(condition: str, engine: Callable[..., Engine]) -> None:
    one = engine(FEW + f"p, auditor, same, pool/*, look, none, {condition}, allow\n")
    wanted = call(Action.LOOK, bound="sha256:x")
    full = Facts(frozenset({"auditor"}), 0, "sha256:x", 2, frozenset({"vetted"}), own=True)
    assert one.decide(wanted, full).allowed
    assert not one.decide(wanted, Facts(frozenset({"auditor"}))).allowed


def test_D4_four_threads_start_cold(load: Callable[..., Bundle]) -> None:
    bundle = load(FEW)
    faults: list[BaseException] = []
    start = threading.Barrier(4)

    def work() -> None:
        try:
            start.wait()
            one = Engine(bundle, lambda: NOW)
            for n in range(150):
                assert one.decide(call(), RESEARCHER).allowed
                assert not one.decide(call(tenant=f"t{n}"), RESEARCHER).allowed
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not faults


def test_D4_four_threads_share_one_engine(engine: Callable[..., Engine]) -> None:
    one = engine(FEW + "p, everyone, *, pool/closed, launch, *, -, deny\n")
    wrong: list[str] = []

    def work(name: str, expected: bool) -> None:
        for _ in range(200):
            if one.decide(call(name=name), RESEARCHER).allowed is not expected:
                wrong.append(name)

    cases = [("open", True), ("closed", False)] * 2
    threads = [threading.Thread(target=work, args=c) for c in cases]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_T9_a_reload_never_opens_a_denied_call(load: Callable[..., Bundle]) -> None:
    bundle = load(FEW + "p, everyone, *, pool/closed, launch, *, -, deny\n")
    slot, ended, wrong = [Engine(bundle, lambda: NOW)], threading.Event(), []

    def read() -> None:
        while not ended.is_set():
            one = slot[0]
            if one.decide(call(name="closed"), RESEARCHER).code != "deny_rule":
                wrong.append("closed")
            if not one.decide(call(name="open"), RESEARCHER).allowed:
                wrong.append("open")

    readers = [threading.Thread(target=read) for _ in range(2)]
    for t in readers:
        t.start()
    for _ in range(40):
        slot[0] = Engine(bundle, lambda: NOW)
    ended.set()
    for t in readers:
        t.join()
    assert not wrong


def test_refuses_when_casbin_is_installed_twice() -> None:
    def only(*names: str) -> Callable[[str], object]:
        def find(name: str) -> object:
            if name not in names:
                raise PackageNotFoundError(name)
            return object()

        return find

    rbac.require_one_casbin(only("pycasbin"))
    for names in ((), ("casbin", "pycasbin")):
        with pytest.raises(Untrusted) as caught:
            rbac.require_one_casbin(only(*names))
        assert caught.value.code == "untrusted.casbin"


def test_every_action_has_its_part(example: Engine) -> None:
    assert set(example._parts) == set(Action) - {Action.STOP}
    assert example.bundle.digest == example.digest
    found = example.decide(call(Action.STOP), Facts(frozenset({"on_call"})))
    assert found.code == "stop_elsewhere"


def test_unhashable_or_foreign_values_are_errors(engine: Callable[..., Engine]) -> None:
    class Sly(str):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = str.__hash__

    odd = type(call())(Action.LAUNCH, Subject("p", "demo"), Resource("pool", "x", Sly("elsewhere"), Tier.NONE))
    assert engine().decide(odd, RESEARCHER).code == "error"
