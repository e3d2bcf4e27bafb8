"""Static checks of a policy before anything runs it: what would be wrong, dead or dangerous, with file:line.

Errors keep a bundle from being used; warnings are for its authors. `check` lists everything at once.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from interlock.call import Action, Effect
from interlock.errors import Malformed
from interlock.tier import Tier
from policy import capability
from policy.facts import ANONYMOUS, EVERYONE
from policy.rules import ANY, MAX_DEPTH, MODEL_FILE, POLICY_FILE, SAME, Rule, Rules, parse_model, parse_policy

OFFICES = frozenset({
    "administrator", "researcher", "safety_officer", "on_call", "auditor", "partner", EVERYONE, ANONYMOUS,
})
TWO_PERSONS = frozenset(
    {Action.LAUNCH, Action.SERVE, Action.EXPORT_WEIGHTS, Action.CHANGE_TIER, Action.DESTROY_KEY}
)
SEPARATE = (
    (Action.LAUNCH, Action.APPROVE), (Action.INVITE, Action.APPROVE), (Action.INVITE, Action.RESUME),
    (Action.LAUNCH, Action.RESUME),
)


@dataclass(frozen=True)
class Problem:
    """One finding. `line` counts from 1; `code` is stable."""

    file: str
    line: int
    code: str
    message: str
    severity: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.severity} [{self.code}] {self.message}"

    def as_json(self) -> dict[str, str | int]:
        """Return the JSON object that `interlock policy check --json` prints."""
        return {"file": self.file, "line": self.line, "code": self.code, "message": self.message,
                "severity": self.severity}


def check(files: Mapping[str, bytes]) -> list[Problem]:
    """Return all problems of model and policy, errors first, in file order. Never raises on bad input."""
    found: list[Problem] = []
    matcher = ""
    for name in (MODEL_FILE, POLICY_FILE):
        if name not in files:
            found.append(Problem(name, 1, "missing", "the file is missing"))
    try:
        matcher = parse_model(files.get(MODEL_FILE, b""))
    except Malformed as fault:
        found.append(_of(fault, MODEL_FILE))
    rows, links, faults = parse_policy(files.get(POLICY_FILE, b""))
    found += [_of(fault, POLICY_FILE) for fault in faults]
    rules = Rules(matcher, rows, links)
    if not rows:
        found.append(Problem(POLICY_FILE, 1, "empty", "there is no rule: everything would be denied"))
    graph = list(_graph(rules))
    found += graph
    if not graph:
        found += [*_single(rules), *_duplicates(rules), *_covered(rules), *_separation(rules)]
    return sorted(found, key=lambda p: (p.severity, p.file, p.line))


def _of(fault: Malformed, file: str) -> Problem:
    words = fault.message.partition(": ")[2] or fault.message
    line = fault.details.get("line", 1)
    return Problem(file, line if isinstance(line, int) else 1, fault.code.partition(".")[2], words)


def _graph(rules: Rules) -> Iterator[Problem]:
    for link in rules.links:
        if link.role in rules.closure(link.parent):
            yield Problem(POLICY_FILE, link.line, "cycle", f"{link.role} inherits from itself")
            return
    for link in rules.links:
        if max(rules.closure(link.role).values()) > MAX_DEPTH:
            yield Problem(POLICY_FILE, link.line, "depth",
                          f"{link.role} inherits over more than {MAX_DEPTH} steps; casbin stops there")
            return


def _single(rules: Rules) -> Iterator[Problem]:
    known = OFFICES | {k.role for k in rules.links}
    for rule in rules.rules:
        if rule.action == Action.STOP:
            yield Problem(POLICY_FILE, rule.line, "stop", "no bundle decides a stop; this rule would do nothing")
        if rule.role not in known:
            yield Problem(POLICY_FILE, rule.line, "role", f"{rule.role} is no known role; a typing error?", "warning")
        if rule.effect is Effect.ALLOW:
            yield from _allow(rule)
        elif rule.conditions & {"mfa", "mfa_bound", "two_persons"}:
            yield Problem(POLICY_FILE, rule.line, "deny_condition",
                          "this denies only those WITH the factor or the persons", "warning")


def _allow(rule: Rule) -> Iterator[Problem]:
    if rule.action == ANY:
        yield Problem(POLICY_FILE, rule.line, "any_action", "an allow names its action; new actions stay closed")
        return
    action = Action(rule.action)
    if rule.tier != Tier.CRITICAL or action not in capability.CLOSED:
        return
    if rule.object == "*/*":
        yield Problem(POLICY_FILE, rule.line, "wildcard", "an allow at tier critical names the kind of its object")
    if action in TWO_PERSONS and not {"mfa_bound", "two_persons"} <= rule.conditions:
        yield Problem(POLICY_FILE, rule.line, "critical",
                      f"{action.value} at tier critical takes mfa_bound+two_persons")
    if action is Action.INFER and not capability.names_programme(rule):
        yield Problem(POLICY_FILE, rule.line, "programme", "inference at tier critical names a programme")


def _duplicates(rules: Rules) -> Iterator[Problem]:
    seen: dict[tuple[str, ...], Rule] = {}
    for rule in rules.rules:
        if (first := seen.setdefault(rule.fields(), rule)) is not rule:
            yield Problem(POLICY_FILE, rule.line, "duplicate", f"says what line {first.line} says", "warning")


def _covered(rules: Rules) -> Iterator[Problem]:
    denies = [r for r in rules.rules if r.effect is Effect.DENY]
    for rule in rules.rules:
        if rule.effect is Effect.ALLOW and (deny := next((d for d in denies if covers(d, rule, rules)), None)):
            yield Problem(POLICY_FILE, rule.line, "unreachable", f"line {deny.line} denies all of it", "warning")


def covers(wide: Rule, narrow: Rule, rules: Rules) -> bool:
    """Return whether every call that `narrow` matches is matched by `wide` too."""
    roles = _of_holder(rules, narrow.role)
    return (
        wide.role in roles
        and (wide.tenant in (ANY, narrow.tenant) or (wide.tenant == SAME and narrow.tenant != ANY))
        and (wide.object in ("*/*", narrow.object)
             or (wide.object.endswith("/*") and narrow.object.startswith(wide.object[:-1])))
        and wide.action in (ANY, narrow.action)
        and wide.tier in (ANY, narrow.tier)
        and wide.conditions <= narrow.conditions
    )


def _of_holder(rules: Rules, role: str) -> set[str]:
    """Return every role that whoever holds `role` has; the anonymous caller alone is not "everyone"."""
    return {*rules.closure(role), *(() if role == ANONYMOUS else (EVERYONE,))}


def _separation(rules: Rules) -> Iterator[Problem]:
    """No role may both ask and approve, or administer people and lift a stop: closures must not meet."""
    may: dict[Action, dict[str, Rule]] = {}
    for action in {a for pair in SEPARATE for a in pair}:
        may[action] = dict(_holders(rules, action))
    for one, other in SEPARATE:
        for role in sorted(may[one].keys() & may[other].keys()):
            yield Problem(POLICY_FILE, may[other][role].line, "separation",
                          f"{role} may {one.value} and {other.value}: these are two persons")


def _holders(rules: Rules, action: Action) -> Iterable[tuple[str, Rule]]:
    allows = [r for r in rules.rules if r.effect is Effect.ALLOW and r.action in (ANY, action)]
    for role in rules.names():
        closure = _of_holder(rules, role)
        for rule in allows:
            if rule.role in closure:
                yield role, rule
                break
