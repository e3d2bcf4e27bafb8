"""When an allowed call still needs a fresh second factor or further persons, by the tier of its resource.

These obligations hold whatever the bundle says: a bundle can ask for more, never for less. They belong to
launch, serving, export, tier change and key destruction; a restart or a load inside an approved plan, which names
the versions by digest, and a single inference need none. Resume and approvals carry a factor and a person's
signature of their own, which the order desk and the supervisor verify. Source: architecture.md, "Model tiers".
"""

from dataclasses import dataclass

from interlock.call import Action, Call
from interlock.tier import PROFILES, Tier
from policy.facts import Facts


@dataclass(frozen=True)
class Obligation:
    """`fresh`: a factor of the last 5 minutes; `bound`: given for this digest; `approvals`: other persons."""

    fresh: bool = False
    bound: bool = False
    approvals: int = 0


@dataclass(frozen=True)
class Missing:
    """What a call still lacks: ``step_up`` or ``approval``, in words, and how many persons."""

    code: str
    message: str
    next_step: str
    needs: int = 0


def obligation(call: Call) -> Obligation:
    """Return what the tier and the action demand of `call`."""
    profile = PROFILES[call.resource.tier]
    match call.action:
        case Action.LAUNCH | Action.SERVE:
            return Obligation(profile.fresh_factor, profile.bound_factor, profile.launch_approvals)
        case Action.EXPORT_WEIGHTS:
            persons = profile.launch_approvals if call.resource.tier is not Tier.HIGH else 1
            return Obligation(profile.fresh_factor, profile.bound_factor, persons)
        case Action.CHANGE_TIER | Action.DESTROY_KEY:
            return Obligation(True, True, 2)
    return Obligation()


def missing(call: Call, facts: Facts) -> Missing | None:
    """Return what `facts` lack for the obligation of `call`, the factor before the persons, or None."""
    wanted = obligation(call)
    if wanted.bound and not facts.factor_bound(call.bound):
        return factor(bound=True)
    if wanted.fresh and not facts.factor_fresh:
        return factor(bound=False)
    lacking = wanted.approvals - max(0, facts.approvals)
    if lacking > 0:
        return persons(lacking)
    return None


def factor(*, bound: bool) -> Missing:
    """Return the words for a second factor that is missing."""
    if bound:
        return Missing("step_up", "a second factor given for exactly this plan within 5 minutes is missing",
                       "step up with a code, bound to the digest of the plan")
    return Missing("step_up", "a second factor within the last 5 minutes is missing", "step up with a code")


def persons(lacking: int) -> Missing:
    """Return the words for `lacking` further persons."""
    who = "one more person has" if lacking == 1 else f"{lacking} more persons have"
    return Missing("approval", f"{who} to approve this very digest",
                   "ask a safety officer under Approvals, or with interlock approve", lacking)
