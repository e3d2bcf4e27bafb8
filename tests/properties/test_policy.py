"""Properties of deciding: casbin against the oracle, deny wins, no permit without a record.

Requests are drawn FROM the rules: a row's own columns with a role that inherits the row's, sometimes bent in
one column; uniform requests would almost never match and let seeded faults live.
"""

import functools
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interlock.call import Action, Call, Effect, Resource, Subject
from interlock.errors import Malformed, Refusal
from interlock.event import Event, Written
from interlock.order import Mode, Scope, ScopeKind, StopOrder
from interlock.tier import Tier
from policy import check, rules
from policy.bundle import Bundle
from policy.decide import decide
from policy.facts import Facts
from policy.gate import Gate
from policy.rbac import Engine
from tests.policy.conftest import MODEL, NOW
from tests.properties.policy_oracle import Link, Row, verdict

ROLES = ["researcher", "auditor", "on_call", "lead", "intern", "everyone"]
ACTIONS = ["launch", "look", "infer", "restart"]
CONDITIONS = ["-", "-", "-", "mfa", "own", "mfa+own", "two_persons", "programme:x", "mfa_bound"]
PLAN = "sha256:plan"

row = st.tuples(
    st.sampled_from(ROLES), st.sampled_from(["same", "*", "a", "b"]),
    st.sampled_from(["*/*", "pool/*", "pool/x", "pool/xy", "model/*"]), st.sampled_from([*ACTIONS, "*"]),
    st.sampled_from(["none", "high", "critical", "*"]), st.sampled_from(CONDITIONS),
    st.sampled_from(["allow", "allow", "allow", "deny"]),
)
links = st.lists(st.tuples(st.sampled_from(ROLES[:5]), st.sampled_from(ROLES[:5])), max_size=4).map(
    lambda pairs: [(a, b) for a, b in pairs if ROLES.index(a) > ROLES.index(b)]
)


@dataclass(frozen=True)
class Asked:
    """One request with its facts."""

    call: Call
    facts: Facts


def _request(draw: st.DrawFn, rows: list[Row], edges: list[Link]) -> Asked:
    role, dom, obj, act, tier, cond, _ = draw(st.sampled_from(rows))
    above = [r for r, parent in edges if parent == role]
    tenant = dom if dom in "ab" else draw(st.sampled_from("ab"))
    kind, _, name = obj.partition("/")
    wanted = {
        "home": tenant if dom != "*" else draw(st.sampled_from("ab")), "tenant": tenant,
        "kind": "pool" if kind == "*" else kind, "name": "x" if name == "*" else name,
        "action": draw(st.sampled_from(ACTIONS)) if act == "*" else act,
        "tier": draw(st.sampled_from(["none", "high", "critical"])) if tier == "*" else tier,
    }
    bent = draw(st.sampled_from([None, None, None, None, "home", "name", "action", "tier"]))
    if bent is not None:
        wanted[bent] = draw(st.sampled_from({"home": ["a", "b"], "name": ["x", "xy", "z"], "action": ACTIONS,
                                             "tier": ["none", "high", "critical"]}[bent]))
    roles = {draw(st.sampled_from([role, *above]))} | draw(st.sets(st.sampled_from(ROLES[:5]), max_size=1))
    held = set(cond.split("+")) if draw(st.integers(0, 4)) else set()
    facts = Facts(
        frozenset(roles), 0 if held & {"mfa", "mfa_bound"} else None, PLAN if "mfa_bound" in held else "",
        2 if "two_persons" in held else 0, frozenset({"x"} if "programme:x" in held else ()), own="own" in held,
    )
    call = Call(
        Action(wanted["action"]), Subject("per_1", wanted["home"]),
        Resource(wanted["kind"], wanted["name"], wanted["tenant"], Tier(wanted["tier"])), bound=PLAN,
    )
    return Asked(call, facts)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Row], list[Link], list[Asked]]:
    rows = draw(st.lists(row, min_size=1, max_size=6))
    edges = draw(links)
    return rows, edges, [_request(draw, rows, edges) for _ in range(6)]


def engine_of(rows: list[Row], edges: list[Link]) -> Engine:
    """Return the engine of these rows; only the static check is stepped over, so that ANY rule is compared."""
    text = "".join(f"p, {', '.join(r)}\n" for r in rows) + "".join(f"g, {a}, {b}\n" for a, b in edges)
    files = {"model.conf": MODEL, "policy.csv": text.encode()}
    bundle = Bundle(1, "sha256:b", NOW, NOW + 1, files, rules.parse(files), frozenset(), b"")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "check", lambda _: [])
        return Engine(bundle, lambda: NOW)


EVERYTHING = StopOrder("a", Scope(ScopeKind.EVERYTHING), Mode.KILL, 1, "x", "")
quick = settings(max_examples=110, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


def test_casbin_agrees_with_the_oracle() -> None:
    count = {True: 0, False: 0}

    @quick
    @given(cases())
    def compare(case: tuple[list[Row], list[Link], list[Asked]]) -> None:
        rows, edges, asked = case
        engine = engine_of(rows, edges)
        for one in asked:
            call, facts = one.call, one.facts
            allows, denies = verdict(
                rows, edges, facts.roles, call.subject.tenant, call.resource.tenant, call.resource.path,
                call.action.value, call.resource.tier.value, facts.held(PLAN),
            )
            found = engine.match(call, facts)
            assert [r.line - 1 for r in found.allows] == allows
            assert [r.line - 1 for r in found.denies] == denies
            count[bool(allows) and not denies] += 1
            if denies or not allows:
                assert not engine.decide(call, facts).allowed

    compare()
    share = count[True] / sum(count.values())
    assert 0.2 <= share <= 0.8, share
    assert sum(count.values()) >= 600


@quick
@given(cases(), row)
def test_adding_a_deny_never_allows(case: tuple[list[Row], list[Link], list[Asked]], extra: Row) -> None:
    rows, edges, asked = case
    before = engine_of(rows, edges)
    after = engine_of([*rows, (*extra[:6], "deny")], edges)
    for one in asked:
        if after.decide(one.call, one.facts).allowed:
            assert before.decide(one.call, one.facts).allowed


@quick
@given(cases(), st.data())
def test_no_permit_without_a_durable_record(
    case: tuple[list[Row], list[Link], list[Asked]], data: st.DataObject
) -> None:
    rows, edges, asked = case
    engine, durable = engine_of(rows, edges), []
    for one in asked:
        fails = data.draw(st.sampled_from([None, None, OSError(28, "full"), RuntimeError()]))
        stop = data.draw(st.sampled_from([None, None, EVERYTHING]))

        def record(event: Event, fails: Exception | None = fails) -> Written:
            if fails:
                raise fails
            durable.append(event)
            return Written(event.id, "s", len(durable))

        gate = Gate(engine.decide, lambda _, stop=stop: stop, record, lambda: 1)  # type: ignore[misc]
        try:
            permit = gate.ask(one.call, one.facts)
        except Refusal:
            continue
        assert durable[-1].id == permit.record
        assert durable[-1].facts["decision"]["effect"] == "allow"
        assert durable[-1].facts["digest"] == permit.call == one.call.digest()
        assert fails is None
        assert stop is None or one.call.action is Action.LOOK


@settings(quick, max_examples=50)
@given(cases())
def test_deciding_twice_gives_the_same(case: tuple[list[Row], list[Link], list[Asked]]) -> None:
    rows, edges, asked = case
    one, two = engine_of(rows, edges), engine_of(rows, edges)
    for a in asked:
        assert one.decide(a.call, a.facts) == two.decide(a.call, a.facts) == decide(one, a.call, a.facts)


@given(st.binary(max_size=300))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_any_bytes_parse_or_are_malformed(data: bytes) -> None:
    for files in ({"model.conf": MODEL, "policy.csv": data}, {"model.conf": data, "policy.csv": b""}):
        try:
            found = rules.parse(files)
        except Malformed:
            assert any(p.severity == "error" for p in check.check(files))
        else:
            assert all(r.effect in Effect for r in found.rules)


@functools.cache
def _example() -> Engine:
    from tests.policy.conftest import EXAMPLE

    files = {n: (EXAMPLE / n).read_bytes() for n in ("model.conf", "policy.csv")}
    return Engine(Bundle(1, "sha256:b", NOW, NOW + 1, files, rules.parse(files), frozenset(), b""), lambda: NOW)


@given(st.sampled_from(list(Action)), st.sampled_from(list(Tier)), st.sets(st.sampled_from(ROLES[:5])),
       st.sampled_from([None, 0, 10**6]), st.sampled_from(["", PLAN, "sha256:other"]), st.integers(0, 3), st.booleans())
@settings(max_examples=400, deadline=None, derandomize=True)
def test_no_critical_launch_without_factor_and_two_persons(
    action: Action, tier: Tier, roles: set[str], age: int | None, bound: str, approvals: int, own: bool
) -> None:
    facts = Facts(frozenset(roles), age, bound, approvals, own=own)
    call = Call(action, Subject("per_1", "a"), Resource("pool", "x", "a", tier), bound=PLAN)
    if action is not Action.LAUNCH or not _example().decide(call, facts).allowed:
        return
    assert "researcher" in roles
    assert tier is Tier.NONE or age == 0
    if tier is Tier.CRITICAL:
        assert bound == PLAN
        assert approvals >= 2
