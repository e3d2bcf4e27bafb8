"""The only file that touches casbin: which rules of a bundle match a call.

Built once per bundle, in one thread at a time: concurrent `ast.parse` on Python 3.11 fails at random
(python/cpython#106905), so every matcher is parsed at load and never again. Rules are split by action, each
part being an enforcer that is never reloaded, saved or changed; a new bundle is a new Engine. Casbin decides
on each role of the caller; all matching rules are noted, and casbin's answer must agree with them.
"""

import threading
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from casbin import Enforcer
from casbin.effect import Effector
from casbin.effect.default_effectors import AllowAndDenyEffector
from casbin.model import FunctionMap, Model

from interlock.call import Action, Call, Decision, Effect
from interlock.errors import Malformed, Untrusted
from policy import check, rules
from policy import decide as deciding
from policy.bundle import Bundle
from policy.facts import ANONYMOUS, EVERYONE, Facts
from policy.rules import Rule, Rules

_LOAD = threading.Lock()
_DEFINITIONS = {
    "r": "sub, home, dom, obj, act, tier, facts", "p": "sub, dom, obj, act, tier, cond, eft, line", "g": "_, _",
    "e": rules.EFFECT,
}


def require_one_casbin(installed: Callable[[str], object] = distribution) -> None:
    """Refuse unless exactly one distribution provides the folder `casbin`: two overwrite each other silently.

    Raises Untrusted (``untrusted.casbin``).
    """
    found = []
    for name in ("casbin", "pycasbin"):
        try:
            installed(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    if len(found) != 1:
        raise Untrusted(f"{len(found)} distributions provide casbin, not one", code="casbin",
                        next_step="reinstall the locked requirements in a new environment")


require_one_casbin()


class _Everything(frozenset[str]):
    """Conditions that all hold: finds the rules that lack nothing else."""

    def __contains__(self, item: object) -> bool:
        return True


class _EveryRule(AllowAndDenyEffector):  # type: ignore[misc]
    """Casbin's allow-and-deny, without the early end: every matching rule is seen."""

    def intermediate_effect(self, effects: set[int]) -> int:  # noqa: ARG002 - casbin's signature
        """Return 'not settled yet', always."""
        return int(Effector.INDETERMINATE)


def _when(held: frozenset[str], cond: str) -> bool:
    return cond == "-" or all(c in held for c in cond.split("+"))


class _Part(Enforcer):  # type: ignore[misc]
    """An enforcer over a fixed list of rules whose matcher is parsed once. Not thread-safe: Engine locks."""

    def __init__(self, matcher: str, rows: list[Rule], links: list[list[str]]) -> None:
        model = Model()
        for section, value in _DEFINITIONS.items():
            model.add_def(section, section, value)
        model.add_def("m", "m", f"({matcher}) && seen(p.line)")
        model["p"]["p"].policy.extend([*r.fields(), str(r.line)] for r in rows)
        model["g"]["g"].policy.extend(links)
        self._expression: Any = None
        self._lines: list[int] = []
        super().__init__(model)
        self.set_effector(_EveryRule())
        self.fm = FunctionMap()
        for name, function in (
            ("in_tenant", rules.in_tenant), ("is_object", rules.is_object), ("is_action", rules.is_one_of),
            ("in_tier", rules.is_one_of), ("when", _when), ("seen", self._seen),
        ):
            self.fm.add_function(name, function)
        self.build_role_links()

    def _seen(self, line: str) -> bool:
        self._lines.append(int(line))
        return True

    def _get_expression(self, expr: str, functions: dict[str, Any] | None = None) -> Any:
        if self._expression is None:
            self._expression = super()._get_expression(expr, functions)
        self._expression.functions = functions
        return self._expression

    def ask(self, *request: object) -> tuple[bool, list[int]]:
        """Return casbin's answer and the lines of all rules that matched."""
        self._lines.clear()
        answer = self.enforce(*request)
        return answer is True, list(self._lines)


class Engine:
    """The rules of one verified bundle, ready to decide. Immutable; a new bundle needs a new Engine.

    Args: `bundle` a verified bundle; `now_us` the wall clock against which the bundle expires. Raises
    Malformed (``malformed.policy_check``) when the static check finds an error.
    """

    def __init__(self, bundle: Bundle, now_us: Callable[[], int] = lambda: time.time_ns() // 1000) -> None:
        problems = [p for p in check.check(bundle.files) if p.severity == "error"]
        if problems:
            raise Malformed(str(problems[0]), code="policy_check", next_step="run interlock policy check",
                            details={"problems": [str(p) for p in problems[:20]]})
        self._bundle, self._now_us = bundle, now_us
        self._rules: Rules = bundle.rules
        self._by_line = {r.line: r for r in self._rules.rules}
        self._known = self._rules.names() | {EVERYONE}
        self._lock = threading.Lock()
        with _LOAD:
            self._parts: dict[Action, _Part | None] = {a: self._part(a) for a in Action if a is not Action.STOP}

    def _part(self, action: Action) -> _Part | None:
        """Return the enforcer for `action`: exact rules and ``*``; None when nothing can match."""
        rows = [r for r in self._rules.rules if r.action in (rules.ANY, action)]
        part = _Part(self._rules.matcher, rows, [[k.role, k.parent] for k in self._rules.links]) if rows else None
        if part is not None:
            # Parses the matcher now, in this thread: no request ever parses.
            part.ask("x", "x", "x", "x/x", action.value, "none", frozenset())
        return part

    @property
    def digest(self) -> str:
        """Return the digest of the bundle that decides."""
        return self._bundle.digest

    @property
    def bundle(self) -> Bundle:
        """Return the bundle that decides."""
        return self._bundle

    @property
    def live(self) -> bool:
        """Return False once the bundle has expired."""
        return not self._bundle.expired(self._now_us())

    def decide(self, call: Call, facts: Facts) -> Decision:
        """Return the whole decision (rules, tiers, factors, persons); never raises."""
        return deciding.decide(self, call, facts)

    def match(self, call: Call, facts: Facts) -> deciding.Verdict:
        """Return the rules that match; raises on an empty field or when casbin and the rules disagree."""
        part = self._parts.get(call.action)
        if part is None:
            return deciding.Verdict()
        request = (call.subject.tenant, call.resource.tenant, call.resource.path, call.action.value,
                   call.resource.tier.value)
        if not all(type(x) is str and x for x in request) or not call.resource.name:
            raise Malformed("a call with an empty field is not decided", code="call")
        # Unknown roles never reach casbin: its role table would grow by whatever a caller sends.
        roles = sorted((facts.roles & self._known) | (set() if ANONYMOUS in facts.roles else {EVERYONE}))
        with self._lock:
            found = self._ask(part, roles, request, facts.held(call.bound))
            allows, denies = self._of(found, Effect.ALLOW), self._of(found, Effect.DENY)
            near = () if allows or denies else self._of(
                self._ask(part, roles, request, _Everything()), Effect.ALLOW
            )
        return deciding.Verdict(allows, denies, near)

    def _ask(self, part: _Part, roles: list[str], request: tuple[str, ...], held: frozenset[str]) -> set[int]:
        lines: set[int] = set()
        for role in roles:
            answer, seen = part.ask(role, *request, held)
            effects = {self._by_line[n].effect for n in seen}
            if answer is not (effects == {Effect.ALLOW}):
                raise Malformed("casbin's answer and the matching rules differ", code="engine")
            lines.update(seen)
        return lines

    def _of(self, lines: set[int], effect: Effect) -> tuple[Rule, ...]:
        return tuple(self._by_line[n] for n in sorted(lines) if self._by_line[n].effect is effect)
