"""What is refused at load, never at request time: each line names file and line."""

import pytest

from interlock.errors import Malformed
from policy import rules
from policy.rules import parse, parse_model, parse_policy
from tests.policy.conftest import FEW, MODEL

GOOD = "p, researcher, same, */*, launch, none, -, allow"


def test_reads_rules_with_their_lines() -> None:
    found = parse({"model.conf": MODEL, "policy.csv": f"# hello\n\n{GOOD}\ng, intern, researcher\n".encode()})
    assert [r.id for r in found.rules] == ["policy.csv:3"]
    assert found.names() == {"researcher", "intern"}
    assert found.closure("intern") == {"intern": 0, "researcher": 1}


@pytest.mark.parametrize(("line", "code"), [
    ("P, researcher, same, */*, launch, none, -, deny", "rule_type"),
    ("p9, researcher, same, */*, launch, none, -, deny", "rule_type"),
    ("p2, researcher, same, */*, launch, none, -, deny", "rule_type"),
    ("p, researcher, same, */*, launch, none, -", "fields"),
    ("p, researcher, same, */*, launch, none, -, allow, more", "fields"),
    ("p, researcher, same, */*, launch, none, -, Allow", "effect"),
    ("p, researcher, same, */*, launch, none, -, maybe", "effect"),
    ("p, researcher, same, */*, lunch, none, -, allow", "action"),
    ("p, researcher, same, */*, launch, medium, -, allow", "tier"),
    ("p, researcher, same, */*, launch, none, mfa|own, allow", "condition"),
    ("p, researcher, same, */*, launch, none, , allow", "condition"),
    ("p, researcher, same, */*, launch, none, mfa+, allow", "condition"),
    ("p, , same, */*, launch, none, -, allow", "role"),
    ("p, *, same, */*, launch, none, -, allow", "role"),
    ("p, researcher, , */*, launch, none, -, allow", "tenant"),
    ("p, researcher, same, *, launch, none, -, allow", "object"),
    ("p, researcher, same, pool/def*, launch, none, -, allow", "object"),
    ("p, researcher, same, .*/x, launch, none, -, allow", "object"),
    ("p, researcher, same, pool/(x, launch, none, -, allow", "value"),
    ("p, researcher, same, pool/x), launch, none, -, allow", "value"),
    ('p, researcher, same, "pool/x", launch, none, -, allow', "value"),
    ("p, researcher, same, pool/x, launch, none, -, allow # why", "value"),
    ("p, researcher, same, pool/é, launch, none, -, allow", "value"),
    ("p, researcher, same, pool/x\x00, launch, none, -, allow", "value"),
    ("g, intern, researcher, demo", "link"),
    ("g, intern", "link"),
    ("allow everything", "rule_type"),
])
def test_refuses_when_line_is_odd(line: str, code: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse({"model.conf": MODEL, "policy.csv": f"{GOOD}\n{line}\n".encode()})
    assert caught.value.code == f"malformed.{code}"
    assert caught.value.message.startswith("policy.csv:2: ")
    assert parse({"model.conf": MODEL, "policy.csv": f"{GOOD}\n{GOOD}\n".encode()}).rules[1].line == 2


def test_T3_every_fault_is_listed_at_once() -> None:
    _, _, faults = parse_policy(b"P, a\np9, b\n" + GOOD.encode())
    assert [f.details["line"] for f in faults] == [1, 2]


def test_T10_a_value_never_becomes_a_line() -> None:
    with pytest.raises(Malformed):
        parse({"model.conf": MODEL, "policy.csv": b"p, guest, same, note\rp, launch, none, -, allow\n"})
    with pytest.raises(Malformed):
        parse({"model.conf": MODEL, "policy.csv": b"\xff\n"})
    with pytest.raises(Malformed):
        parse({"model.conf": MODEL, "policy.csv": b"p, " + b"a" * 2000})


def _matcher(text: str) -> bytes:
    return MODEL.replace(MODEL[MODEL.index(b"m = "):], f"m = {text}\n".encode())


ALL = " && ".join(rules.CONJUNCTS)


@pytest.mark.parametrize("text", [
    f"{ALL} && eval(p.cond)",
    f"{ALL} && r.sub.wipe()",
    f"{ALL} && r.sub.role == p.sub",
    f"{ALL} && __import__(r.obj)",
    f"{ALL} && regexMatch(r.obj, p.obj)",
    f"{ALL} && g(r.sub)",
    f"{ALL} && g(r.sub, p.sub, r.dom)",
    f"{ALL} && g(*r.sub, p.sub)",
    f"{ALL} && r.obj < p.obj",
    f'{ALL} && r.obj == "a && b"',
    f'{ALL} && r.obj == "r.sub"',
    f'{ALL} && r.obj == "x"  # always',
    f"{ALL} && [x for x in r.obj]",
    f"{ALL} && (lambda: 1)()",
    f"{ALL} && 1",
    f'{ALL} && "yes"',
    f"{ALL} && p.line == r.obj",
    f"({ALL}) || r.act == p.act",
    "r.sub == p.sub",
    ALL.replace(" && when(r.facts, p.cond)", ""),
    ALL.replace("in_tier(r.tier, p.tier)", "!in_tier(r.tier, p.tier)"),
    "g(r.sub, p.sub) &&",
    "(" * 300 + ")" * 300,
])
def test_refuses_when_matcher_is_not_listed(text: str) -> None:
    with pytest.raises(Malformed) as caught:
        parse_model(_matcher(text))
    assert caught.value.code == "malformed.matcher"


def test_T5_T6_matchers_that_only_narrow_are_taken() -> None:
    for text in (ALL, f'{ALL} && r.obj != "pool/secret"', f'{ALL} && (r.dom == "a" || !in_tier(r.tier, p.tier))'):
        assert parse_model(_matcher(text)) == text


def test_T1_refuses_when_effect_allows_without_a_match() -> None:
    with pytest.raises(Malformed) as caught:
        parse_model(MODEL.replace(rules.EFFECT.encode(), b"!some(where (p.eft == deny))"))
    assert caught.value.code == "malformed.effect"
    with pytest.raises(Malformed):
        parse_model(MODEL.replace(rules.EFFECT.encode(), b"some(where (p.eft == allow))"))


@pytest.mark.parametrize(("old", "new"), [
    (b"[matchers]", b"[matcher]"),
    (b"[role_definition]\ng = _, _\n", b""),
    (b"g = _, _", b"g = _, _, _"),
    (b"g = _, _", b"g = _, _\ng2 = _, _"),
    (b"g = _, _", b"g = _, _\ng = _, _"),
    (b"r = sub,", b"r = who,"),
    (b"p = sub, dom, obj, act, tier, cond, eft", b"p = sub, dom, obj, act, tier, cond"),
    (b"m = g", b"m2 = g"),
    (b"[matchers]", b"[matchers"),
])
def test_refuses_when_model_has_other_sections(old: bytes, new: bytes) -> None:
    assert old in MODEL
    with pytest.raises(Malformed):
        parse_model(MODEL.replace(old, new))
    assert parse_model(MODEL).startswith("g(r.sub")


def test_refuses_when_file_is_missing() -> None:
    with pytest.raises(Malformed):
        parse({"model.conf": MODEL})
    assert parse({"model.conf": MODEL, "policy.csv": FEW.encode()})


def test_refuses_when_there_are_too_many_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MAX_RULES", 1)
    with pytest.raises(Malformed):
        parse({"model.conf": MODEL, "policy.csv": FEW.encode()})


@pytest.mark.parametrize(("path", "pattern", "covered"), [
    ("pool/a", "pool/a", True), ("pool/a", "pool/*", True), ("pool/a", "*/*", True), ("pool/ab", "pool/a", False),
    ("pools/a", "pool/*", False), ("pool/", "pool/*", False), ("pool/a/b", "pool/*", True),
])
def test_objects_are_exact_or_a_kind(path: str, pattern: str, covered: bool) -> None:
    assert rules.is_object(path, pattern) is covered


@pytest.mark.parametrize(("home", "resource", "wanted", "covered"), [
    ("a", "a", "same", True), ("a", "b", "same", False), ("a", "b", "*", True), ("a", "a", "a", True),
    ("b", "a", "a", False), ("a", "b", "a", False), ("b", "b", "a", False),
])
def test_tenants_do_not_mix(home: str, resource: str, wanted: str, covered: bool) -> None:
    assert rules.in_tenant(home, resource, wanted) is covered
