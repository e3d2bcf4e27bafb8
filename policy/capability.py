"""What tier critical closes by default, whatever a wildcard in a rule says.

An action of CLOSED on a critical resource is opened only by a rule that names the tier ``critical``; inference
also by a live membership of a partner programme that the rule names. A deny rule is never narrowed here.
Source: architecture.md, "Model tiers".
"""

from interlock.call import Action, Call, Kind
from interlock.tier import Tier
from policy.rules import Rule

CLOSED = frozenset({a for a in Action if a.kind is Kind.WORK} | {Action.CHANGE_TIER, Action.DESTROY_KEY})


def opens(rule: Rule, call: Call) -> bool:
    """Return whether the allow rule `rule` may open `call` as far as the tier of the resource goes."""
    if call.resource.tier is not Tier.CRITICAL or call.action not in CLOSED:
        return True
    if rule.tier != Tier.CRITICAL:
        return False
    return call.action is not Action.INFER or names_programme(rule)


def names_programme(rule: Rule) -> bool:
    """Return whether a condition of the rule asks for a programme membership."""
    return any(c.startswith("programme:") for c in rule.conditions)
