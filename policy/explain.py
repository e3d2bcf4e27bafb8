"""Why a decision came out so, and the nearest change that would flip it. Decides anew, through no cache."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

from interlock.call import Call, Decision
from policy.decide import decide
from policy.facts import EVERYONE, Facts
from policy.rbac import Engine
from policy.rules import Rule

MAX_TOGETHER = 3


@dataclass(frozen=True)
class Change:
    """One thing that could be different: in words, and who can bring it about."""

    what: str
    who: str

    def as_json(self) -> dict[str, str]:
        """Return the JSON object."""
        return {"what": self.what, "who": self.who}


@dataclass(frozen=True)
class Explanation:
    """A decision, the text of its deciding rules, and the smallest set of changes that turns no into yes.

    `changes` is empty for an allow, and for a denial that no change of facts can flip.
    """

    decision: Decision
    rules: tuple[str, ...]
    changes: tuple[Change, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object of `GET /api/why` and `interlock why --json`."""
        return {"decision": self.decision.as_json(), "rules": list(self.rules),
                "changes": [c.as_json() for c in self.changes]}


def explain(engine: Engine | None, call: Call, facts: Facts) -> Explanation:
    """Return why `call` is decided as it is under `facts`, and what would flip a denial."""
    decision = decide(engine, call, facts)
    by_id = {} if engine is None else {r.id: r for r in engine.bundle.rules.rules}
    rules = tuple(f"{i}: p, {', '.join(by_id[i].fields())}" if i in by_id else i for i in decision.rules)
    changes = () if decision.allowed else nearest(engine, call, facts, decision)
    return Explanation(decision, rules, changes)


def nearest(engine: Engine | None, call: Call, facts: Facts, decision: Decision) -> tuple[Change, ...]:
    """Return the smallest set of at most MAX_TOGETHER changes that makes the answer a yes, else ()."""
    if decision.code == "no_bundle" or engine is None:
        return (Change("publish a policy bundle", "two pinned bundle signers and an administrator"),)
    if decision.code == "deny_rule":
        return (Change(f"remove or narrow {', '.join(decision.rules)} in a new bundle", "the authors of the policy"),)
    options = list(_options(engine, call, facts))
    for size in range(1, MAX_TOGETHER + 1):
        for chosen in combinations(options, size):
            changed = facts
            for _, fields in chosen:
                changed = replace(changed, **_merged(changed, fields))
            if decide(engine, call, changed).allowed:
                return tuple(change for change, _ in chosen)
    return ()


def _merged(facts: Facts, fields: dict[str, Any]) -> dict[str, Any]:
    return {k: getattr(facts, k) | v if isinstance(v, frozenset) else v for k, v in fields.items()}


def _options(engine: Engine, call: Call, facts: Facts) -> Iterator[tuple[Change, dict[str, Any]]]:
    """Yield single changes, the caller's own first."""
    if not facts.factor_fresh:
        yield Change("give a second factor", "yourself, with a code"), {"mfa_age_ms": 0}
    if call.bound and not facts.factor_bound(call.bound):
        yield (Change("give a second factor for exactly this plan", "yourself, with a code"),
               {"mfa_age_ms": 0, "mfa_bound": call.bound})
    for count in (1, 2):
        if facts.approvals < count:
            lacking = count - max(0, facts.approvals)
            yield Change(f"{lacking} more approval{'s' * (lacking > 1)}", "safety officers"), {"approvals": count}
    rules = [r for r in engine.bundle.rules.rules if call.action == r.action]
    for name in sorted({c.partition(":")[2] for r in rules for c in r.conditions if c.startswith("programme:")})[:4]:
        if name not in facts.programmes:
            yield (Change(f"membership of the programme {name}", "an administrator"),
                   {"programmes": frozenset({name})})
    for role in _roles(rules, facts):
        yield Change(f"the role {role}", "an administrator"), {"roles": frozenset({role})}
    if not facts.own:
        yield Change("be the owner", "the present owner"), {"own": True}


def _roles(rules: list[Rule], facts: Facts) -> list[str]:
    return sorted({r.role for r in rules} - facts.roles - {EVERYONE})[:8]
