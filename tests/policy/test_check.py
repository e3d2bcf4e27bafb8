"""Static checks: each finding with its line, and a policy that is free of it."""

import pytest

from policy.check import check
from tests.policy.conftest import EXAMPLE, FEW, MODEL


def _found(policy: str, model: bytes = MODEL) -> list[tuple[int, str, str]]:
    return [(p.line, p.code, p.severity) for p in check({"model.conf": model, "policy.csv": policy.encode()})]


def test_the_example_is_clean() -> None:
    assert check({n: (EXAMPLE / n).read_bytes() for n in ("model.conf", "policy.csv")}) == []
    assert _found(FEW) == []


@pytest.mark.parametrize(("line", "code"), [
    ("P, a, same, */*, look, none, -, allow", "rule_type"),
    ("p, a, same, */*, look, none", "fields"),
    ("p, on_call, *, */*, stop, *, -, allow", "stop"),
    ("p, auditor, *, */*, *, none, -, allow", "any_action"),
    ("p, researcher, same, */*, restart, critical, -, allow", "wildcard"),
    ("p, researcher, same, pool/*, launch, critical, mfa_bound, allow", "critical"),
    ("p, researcher, same, pool/*, launch, critical, mfa+two_persons, allow", "critical"),
    ("p, researcher, same, model/*, export_weights, critical, -, allow", "critical"),
    ("p, researcher, same, model/*, infer, critical, -, allow", "programme"),
    ("p, researcher, same, */*, approve, none, -, allow", "separation"),
    ("p, researcher, same, */*, resume, none, -, allow", "separation"),
    ("g, researcher, researcher", "cycle"),
])
def test_refuses_when_a_rule_is_dangerous(line: str, code: str) -> None:
    assert (3, code, "error") in _found(f"{FEW}{line}\n")


@pytest.mark.parametrize(("line", "code"), [
    ("p, resaercher, same, */*, look, none, -, allow", "role"),
    ("p, researcher, same, */*, launch, none, -, allow", "duplicate"),
    ("p, researcher, same, */*, look, none, mfa, deny", "deny_condition"),
])
def test_warns_of_what_looks_wrong(line: str, code: str) -> None:
    assert (3, code, "warning") in _found(f"{FEW}{line}\n")


def test_warns_of_a_rule_that_a_deny_covers() -> None:
    for deny in ("p, everyone, *, */*, launch, *, -, deny", "p, researcher, same, */*, *, none, -, deny"):
        assert (1, "unreachable", "warning") in _found(f"{FEW}{deny}\n")
    for deny in ("p, everyone, *, */*, launch, high, -, deny", "p, everyone, *, pool/*, launch, *, -, deny",
                 "p, everyone, *, */*, launch, *, own, deny", "p, lead, *, */*, launch, *, -, deny"):
        assert not [f for f in _found(f"{FEW}{deny}\n") if f[1] == "unreachable"]


def test_a_narrow_kind_is_covered_by_a_wide_one() -> None:
    policy = "p, auditor, demo, pool/a, look, none, own, allow\np, everyone, same, pool/*, look, none, own, deny\n"
    assert (1, "unreachable", "warning") in _found(policy)


def test_separation_follows_inheritance() -> None:
    policy = FEW + "p, safety_officer, *, */*, approve, *, -, allow\n"
    assert not [f for f in _found(policy) if f[1] == "separation"]
    assert [f for f in _found(policy + "g, lead, researcher\ng, lead, safety_officer\n") if f[1] == "separation"]


def test_a_cycle_over_three_roles_and_a_long_chain() -> None:
    assert [f[1] for f in _found(FEW + "g, a, b\ng, b, c\ng, c, a\n")] == ["cycle"]
    assert [f[1] for f in _found(FEW + "".join(f"g, r{n}, r{n + 1}\n" for n in range(10)))] == ["depth"]
    assert _found(FEW + "".join(f"g, r{n}, r{n + 1}\n" for n in range(9))) == []


def test_lists_everything_at_once_and_never_raises() -> None:
    found = _found("P, a\np, b\n", b"nonsense")
    assert {f[1] for f in found} == {"model", "rule_type", "fields", "empty"}
    assert {p.code for p in check({})} == {"missing", "model", "empty"}
    assert [p.code for p in check({"model.conf": MODEL, "policy.csv": b"\xff"})] == ["encoding", "empty"]
    problem = check({"model.conf": MODEL, "policy.csv": b"p, b\n" + FEW.encode()})[0]
    assert str(problem).startswith("policy.csv:1: error [fields] ")
    assert problem.as_json()["line"] == 1
