"""Model and rules of a bundle, read strictly: what casbin would drop, guess or rewrite is refused here.

`model.conf` and `policy.csv` keep casbin's formats. Refused with file and line: an unknown rule type (casbin
drops it silently), a wrong field count (casbin then fails for everybody), brackets, quotes and control
characters (they move columns), unknown actions, tiers, effects and conditions, `eval()`, method and attribute
calls in the matcher, and any effect that allows when nothing matches.
Page: docs/formats/policy-bundle.md.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from interlock.call import Action, Effect
from interlock.errors import Malformed
from interlock.tier import Tier

MODEL_FILE, POLICY_FILE = "model.conf", "policy.csv"
ANY, SAME = "*", "same"
MAX_DEPTH, MAX_RULES, MAX_LINE = 9, 20_000, 1_000
EFFECT = "some(where (p.eft == allow)) && !some(where (p.eft == deny))"
_SECTIONS = {
    "request_definition": ("r", "sub, home, dom, obj, act, tier, facts"),
    "policy_definition": ("p", "sub, dom, obj, act, tier, cond, eft"),
    "role_definition": ("g", "_, _"),
    "policy_effect": ("e", EFFECT),
    "matchers": ("m", None),
}
CONJUNCTS = (
    "g(r.sub, p.sub)", "in_tenant(r.home, r.dom, p.dom)", "is_object(r.obj, p.obj)", "is_action(r.act, p.act)",
    "in_tier(r.tier, p.tier)", "when(r.facts, p.cond)",
)
_FUNCTIONS = {"g": 2, "in_tenant": 3, "is_object": 2, "is_action": 2, "in_tier": 2, "when": 2}
_COLUMNS = {"r": {"sub", "home", "dom", "obj", "act", "tier"}, "p": {"sub", "dom", "obj", "act", "tier"}}
_ROLE = re.compile(r"[a-z][a-z0-9_]{0,63}")
_TENANT = re.compile(r"\*|[a-z0-9][a-z0-9_.-]{0,63}")
_OBJECT = re.compile(r"(\*/\*|[a-z][a-z0-9_-]{0,63}/(\*|[A-Za-z0-9_.:@/-]{1,256}))")
_CONDITION = re.compile(r"mfa|mfa_bound|two_persons|own|programme:[a-z0-9][a-z0-9_-]{0,63}")
_LITERAL = re.compile(r"[A-Za-z0-9_*:/-]{0,64}")
_PLAIN = re.compile(r"[ -~]*")


@dataclass(frozen=True)
class Rule:
    """One `p` line. `conditions` is empty for ``-``; all of them must hold."""

    line: int
    role: str
    tenant: str
    object: str
    action: str
    tier: str
    conditions: frozenset[str]
    effect: Effect

    @property
    def id(self) -> str:
        """Return ``policy.csv:LINE``, as records and explanations name the rule."""
        return f"{POLICY_FILE}:{self.line}"

    def fields(self) -> tuple[str, ...]:
        """Return the columns in file order, conditions sorted; equal fields mean an equal rule."""
        cond = "+".join(sorted(self.conditions)) or "-"
        return (self.role, self.tenant, self.object, self.action, self.tier, cond, self.effect.value)


@dataclass(frozen=True)
class Link:
    """One `g` line: `role` inherits everything that `parent` may."""

    line: int
    role: str
    parent: str


@dataclass(frozen=True)
class Rules:
    """What the two files of a bundle say. `matcher` is casbin's matcher text."""

    matcher: str
    rules: tuple[Rule, ...]
    links: tuple[Link, ...]

    def names(self) -> frozenset[str]:
        """Return every role that a rule or link names."""
        return frozenset({r.role for r in self.rules} | {x for k in self.links for x in (k.role, k.parent)})

    def closure(self, role: str) -> dict[str, int]:
        """Return each role that `role` has, itself included, with its distance in links."""
        found, edge, depth = {role: 0}, {role}, 0
        while edge:
            depth += 1
            edge = {k.parent for k in self.links if k.role in edge} - set(found)
            found.update(dict.fromkeys(edge, depth))
        return found


def refuse(file: str, line: int, words: str, code: str) -> Malformed:
    """Return the refusal that names file and line."""
    return Malformed(
        f"{file}:{line}: {words}", code=code, next_step="correct the line and run interlock policy check",
        details={"file": file, "line": line},
    )


def parse(files: Mapping[str, bytes]) -> Rules:
    """Return the rules of `files`; raises Malformed at the first fault, with file and line."""
    for name in (MODEL_FILE, POLICY_FILE):
        if name not in files:
            raise Malformed(f"the bundle has no {name}", code="policy")
    matcher = parse_model(files[MODEL_FILE])
    rules, links, faults = parse_policy(files[POLICY_FILE])
    if faults:
        raise faults[0]
    return Rules(matcher, rules, links)


def _lines(data: bytes, file: str) -> Iterable[tuple[int, str]]:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise refuse(file, 1, "not UTF-8", "encoding") from None
    for number, raw in enumerate(text.split("\n"), 1):
        line = raw.strip()
        if len(raw) > MAX_LINE:
            raise refuse(file, number, f"a line longer than {MAX_LINE} characters", "line")
        if line and not line.startswith("#"):
            yield number, line


# ---- model.conf ------------------------------------------------------------------------------------

def parse_model(data: bytes) -> str:
    """Return the matcher of `model.conf`; raises Malformed for any section but the five, each once."""
    found: dict[str, tuple[int, str]] = {}
    section = ""
    for number, line in _lines(data, MODEL_FILE):
        if line.startswith("["):
            section = line.strip("[]").strip()
            if section not in _SECTIONS or line != f"[{section}]":
                raise refuse(MODEL_FILE, number, "unknown section", "model")
            continue
        key, equals, value = line.partition("=")
        if not section or not equals or section in found or key.strip() != _SECTIONS[section][0]:
            raise refuse(MODEL_FILE, number, "every section holds its one definition", "model")
        found[section] = (number, value.strip())
    return _checked_model(found)


def _checked_model(found: Mapping[str, tuple[int, str]]) -> str:
    for section, (_, wanted) in _SECTIONS.items():
        if section not in found:
            raise refuse(MODEL_FILE, 1, f"section [{section}] is missing", "model")
        number, value = found[section]
        if wanted is not None and _squeeze(value) != _squeeze(wanted):
            code = "effect" if section == "policy_effect" else "model"
            raise refuse(MODEL_FILE, number, f"[{section}] must read: {wanted}", code)
    number, matcher = found["matchers"]
    check_matcher(matcher, number)
    return matcher


def _squeeze(text: str) -> str:
    return "".join(text.split())


def as_python(matcher: str) -> str:
    """Return the matcher in Python's words, by casbin's own three rewritings."""
    return re.sub(r"!(?!=)", "not ", matcher.replace("&&", " and ").replace("||", " or ")).strip()


def check_matcher(matcher: str, line: int = 1) -> None:
    """Refuse a matcher with anything but listed names and calls, or without one of CONJUNCTS.

    Raises Malformed (``malformed.matcher``).
    """
    if not _PLAIN.fullmatch(matcher) or "#" in matcher:
        raise refuse(MODEL_FILE, line, "a matcher is plain text without comments", "matcher")
    try:
        tree = ast.parse(as_python(matcher), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise refuse(MODEL_FILE, line, "the matcher is no expression", "matcher") from None
    for node in ast.walk(tree):
        if not _allowed(node):
            raise refuse(MODEL_FILE, line, f"the matcher holds a {type(node).__name__} that is not allowed", "matcher")
    parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
    for conjunct in CONJUNCTS:
        if ast.unparse(ast.parse(conjunct, mode="eval").body) not in {ast.unparse(p) for p in parts}:
            raise refuse(MODEL_FILE, line, f"the matcher lacks the condition {conjunct}", "matcher")
    for part in parts:
        if not isinstance(part, ast.BoolOp | ast.UnaryOp | ast.Compare | ast.Call):
            raise refuse(MODEL_FILE, line, "a part of the matcher is no yes-or-no", "matcher")


def _allowed(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return _FUNCTIONS.get(name) == len(args) and all(isinstance(a, ast.Attribute) for a in args)
        case ast.Attribute(value=ast.Name(id=owner), attr=attr):
            return attr in _COLUMNS.get(owner, set()) or (owner, attr) in {("r", "facts"), ("p", "cond")}
        case ast.Constant(value=str() as text):
            return _LITERAL.fullmatch(text) is not None
        case ast.Compare(left=left, ops=[ast.Eq() | ast.NotEq()], comparators=[right]):
            return all(isinstance(x, ast.Attribute | ast.Constant) for x in (left, right))
        case ast.BoolOp() | ast.UnaryOp(op=ast.Not()) | ast.And() | ast.Or() | ast.Not() | ast.Eq() | ast.NotEq():
            return True
        case ast.Name(id=name):
            return name in _FUNCTIONS or name in _COLUMNS
        case ast.Load():
            return True
    return False


# ---- policy.csv ------------------------------------------------------------------------------------

def parse_policy(data: bytes) -> tuple[tuple[Rule, ...], tuple[Link, ...], list[Malformed]]:
    """Return rules, links and ALL faults of `policy.csv` (each a Malformed that names its line)."""
    rules: list[Rule] = []
    links: list[Link] = []
    faults: list[Malformed] = []
    try:
        lines = list(_lines(data, POLICY_FILE))
    except Malformed as fault:
        return (), (), [fault]
    for number, line in lines:
        try:
            row = _row(number, line)
        except Malformed as fault:
            faults.append(fault)
            continue
        if isinstance(row, Rule):
            rules.append(row)
        else:
            links.append(row)
    if len(rules) + len(links) > MAX_RULES:
        faults.append(refuse(POLICY_FILE, 1, f"more than {MAX_RULES} rules", "rules"))
    return tuple(rules), tuple(links), faults


def _row(number: int, line: str) -> Rule | Link:
    if not _PLAIN.fullmatch(line) or re.search(r"[()\[\]{}\"'\\#;=]", line):
        raise refuse(POLICY_FILE, number, "a value holds a bracket, a quote, a comment or no plain text", "value")
    kind, *fields = (f.strip() for f in line.split(","))
    if kind == "p":
        return _rule(number, fields)
    if kind == "g":
        if len(fields) != 2 or not all(_ROLE.fullmatch(f) for f in fields):
            raise refuse(POLICY_FILE, number, "a g line reads: g, role, inherited role", "link")
        return Link(number, *fields)
    raise refuse(POLICY_FILE, number, f"unknown rule type {kind[:20]!r}", "rule_type")


def _rule(number: int, fields: list[str]) -> Rule:
    if len(fields) != 7:
        raise refuse(
            POLICY_FILE, number, f"{len(fields)} fields, not 7: role, tenant, object, action, tier, condition, effect",
            "fields",
        )
    role, tenant, obj, action, tier, cond, effect = fields
    conditions = frozenset() if cond == "-" else frozenset(cond.split("+"))
    checks = (
        (_ROLE.fullmatch(role), "role"), (_TENANT.fullmatch(tenant), "tenant"), (_OBJECT.fullmatch(obj), "object"),
        (action == ANY or action in set(Action), "action"), (tier == ANY or tier in set(Tier), "tier"),
        (all(_CONDITION.fullmatch(c) for c in conditions), "condition"), (effect in set(Effect), "effect"),
    )
    for good, column in checks:
        if not good:
            raise refuse(POLICY_FILE, number, f"unknown or malformed {column}", column)
    return Rule(number, role, tenant, obj, action, tier, conditions, Effect(effect))


# ---- what one rule covers --------------------------------------------------------------------------

def in_tenant(home: str, of_resource: str, wanted: str) -> bool:
    """Return whether a rule's tenant column covers a subject of `home` and a resource.

    ``same``: subject and resource share a tenant; a name: both are in it; ``*``: across tenants (offices).
    """
    if wanted == ANY:
        return True
    return home == of_resource and wanted in (SAME, home)


def is_object(path: str, pattern: str) -> bool:
    """Return whether `pattern` (``kind/name``, ``kind/*`` or ``*/*``) covers the path ``kind/name``."""
    if pattern == "*/*":
        return True
    return path.startswith(pattern[:-1]) and len(path) >= len(pattern) if pattern.endswith("/*") else path == pattern


def is_one_of(value: str, wanted: str) -> bool:
    """Return whether the column `wanted` is `value` or ``*``."""
    return wanted in (ANY, value)


# ---- what is critical about a set of rules ---------------------------------------------------------

SENSITIVE = frozenset({
    Action.RESUME, Action.EXPORT_WEIGHTS, Action.CHANGE_TIER, Action.DESTROY_KEY, Action.CHANGE_TRUST,
    Action.PUBLISH_BUNDLE, Action.APPROVE,
})


def critical_part(rules: Rules) -> frozenset[tuple[str, ...]]:
    """Return what two signers must agree on: matcher, links, and rules for tier critical or SENSITIVE actions.

    A rule with ``*`` in the tier or action column concerns them too.
    """
    rows = {
        r.fields() for r in rules.rules if r.tier in (ANY, Tier.CRITICAL) or r.action == ANY or r.action in SENSITIVE
    }
    links = {("g", k.role, k.parent) for k in rules.links}
    return frozenset({("m", _squeeze(rules.matcher)), *links, *rows})
