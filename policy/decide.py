"""decide(engine, call, facts) → Decision: pure, total, no clock, no IO. Anything unclear is a no.

Order: sign-in and enrolment are always open → in state bootstrap an administrator never approves or resumes →
a deny rule wins → the first steps of a new site → some allow rule, narrowed by the tier → second factor and
further persons. A stop is not decided here at all: policy/stop_rule.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from interlock.call import Action, Call, Decision, Effect
from policy import capability, stepup
from policy.facts import FRESH_MS, Facts
from policy.rules import Rule

__all__ = ["ALWAYS_OPEN", "FRESH_MS", "Engine", "Facts", "Verdict", "decide"]

ALWAYS_OPEN = frozenset({Action.SIGN_IN, Action.ENROL})
FIRST_STEPS = frozenset({Action.INVITE, Action.JOIN_NODE, Action.PUBLISH_BUNDLE, Action.LOOK})
NEVER_FIRST = frozenset({Action.APPROVE, Action.RESUME})
ADMINISTRATOR = "administrator"


@dataclass(frozen=True)
class Verdict:
    """What the rules say: all allow and deny rules that match, and allow rules that lack only a condition."""

    allows: tuple[Rule, ...] = ()
    denies: tuple[Rule, ...] = ()
    near: tuple[Rule, ...] = ()


class Engine(Protocol):
    """What decides by the rules of one bundle; policy/rbac.py has the real one."""

    @property
    def digest(self) -> str:
        """Return the digest of the bundle."""

    @property
    def live(self) -> bool:
        """Return False once the bundle has expired; it then counts as absent."""

    def match(self, call: Call, facts: Facts) -> Verdict:
        """Return the matching rules; may raise, which counts as a denial."""


def decide(engine: Engine | None, call: Call, facts: Facts) -> Decision:
    """Return the decision on `call`. Never raises; a fault anywhere is a denial with code ``error``.

    Args: `engine` None when no bundle is in force: then only sign-in and enrolment are open, and to an
    administrator the publishing of a bundle (its own signatures carry the authority).
    """
    try:
        return _decide(engine, call, facts)
    except Exception as fault:
        return _no("error", f"the policy could not be evaluated ({type(fault).__name__})",
                   "tell an administrator; the active bundle or the facts are at fault")


def _decide(engine: Engine | None, call: Call, facts: Facts) -> Decision:
    if call.action is Action.STOP:
        return _no("stop_elsewhere", "a stop is not decided by policy", "use interlock stop")
    if call.action in ALWAYS_OPEN:
        return _yes(("builtin:always_open",), "")
    if facts.state != "ready" and call.action in NEVER_FIRST and ADMINISTRATOR in facts.roles:
        return _no("bootstrap", "whoever administers people never approves or resumes",
                   "invite two safety officers; they approve")
    rules = engine if engine is not None and engine.live else None
    verdict = Verdict() if rules is None else rules.match(call, facts)
    digest = "" if rules is None else rules.digest
    if verdict.denies:
        return _no("deny_rule", f"{verdict.denies[0].id} denies this", "ask the authors of the policy",
                   rules=verdict.denies, bundle=digest)
    if first_step(call, facts, bundle=rules is not None):
        return _yes(("builtin:first_steps",), digest)
    if rules is None:
        return _no("no_bundle", "no policy bundle is in force", "publish a bundle signed by two pinned signers")
    allows = tuple(r for r in verdict.allows if capability.opens(r, call))
    return _by_rules(allows, call, facts, digest) if allows else _short(verdict, call, facts, digest)


def first_step(call: Call, facts: Facts, *, bundle: bool) -> bool:
    """Return whether `call` is one that an administrator may do before policy can say so.

    In state bootstrap: invite, join a node, publish a bundle, look. Afterwards, as long as no bundle is in
    force: publish one, else a site could never get out of that state.
    """
    if ADMINISTRATOR not in facts.roles:
        return False
    if facts.state == "bootstrap":
        return call.action in FIRST_STEPS
    return not bundle and call.action is Action.PUBLISH_BUNDLE


def _by_rules(allows: tuple[Rule, ...], call: Call, facts: Facts, digest: str) -> Decision:
    """Decide a call that some rule allows: what the tier demands beyond it."""
    lacking = stepup.missing(call, facts)
    if lacking is None:
        return _yes((r.id for r in allows), digest)
    return _no(lacking.code, lacking.message, lacking.next_step, rules=allows, bundle=digest, needs=lacking.needs)


def _short(verdict: Verdict, call: Call, facts: Facts, digest: str) -> Decision:
    """Decide a call that no rule allows: name the rule that lacks the least, else say that there is none."""
    near = [r for r in verdict.near if capability.opens(r, call)]
    if not near:
        roles = ", ".join(sorted(facts.roles)) or "somebody without a role"
        return _no("no_match", f"no rule lets {roles} do {call.action.value} on {call.resource.path} "
                   f"(tier {call.resource.tier.value})", "ask an administrator for a role that may", bundle=digest)
    held = facts.held(call.bound)
    best = min(near, key=lambda r: (_hardness(r.conditions - held), len(r.conditions - held), r.line))
    lacking = _lacking(best.conditions - held, facts)
    return _no(lacking.code, lacking.message, lacking.next_step, rules=(best,), bundle=digest, needs=lacking.needs)


def _hardness(conditions: Iterable[str]) -> int:
    """Return 1 when something is lacking that the caller cannot bring along himself."""
    return int(any(c == "own" or c.startswith("programme:") for c in conditions))


def _lacking(conditions: frozenset[str], facts: Facts) -> stepup.Missing:
    programmes = sorted(c.partition(":")[2] for c in conditions if c.startswith("programme:"))
    if programmes:
        return stepup.Missing("no_match", f"no live membership of the programme {programmes[0]}",
                              "ask an administrator to enrol you in the programme")
    if "own" in conditions:
        return stepup.Missing("no_match", "this is not yours", "ask its owner")
    if "mfa_bound" in conditions or "mfa" in conditions:
        return stepup.factor(bound="mfa_bound" in conditions)
    return stepup.persons(2 - max(0, facts.approvals))


def _yes(rules: Iterable[str], bundle: str) -> Decision:
    return Decision(Effect.ALLOW, "allowed", "allowed", tuple(rules), bundle)


def _no(
    code: str, message: str, next_step: str, *, rules: tuple[Rule, ...] = (), bundle: str = "", needs: int = 0
) -> Decision:
    return Decision(Effect.DENY, code, message, tuple(r.id for r in rules), bundle, next_step, needs)
