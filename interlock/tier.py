"""Model tiers as named profiles of numbers (architecture.md, table "Model tiers")."""

from dataclasses import dataclass
from enum import StrEnum

from interlock.errors import Malformed


class Tier(StrEnum):
    """How dangerous the model behind a resource is. An unknown tier is refused, never defaulted."""

    NONE = "none"
    HIGH = "high"
    CRITICAL = "critical"


@dataclass(frozen=True)
class TierProfile:
    """What a tier demands. Durations in milliseconds.

    `lease_ms` life of a lease; `absent_ms` how long a run goes on without a control plane, and the age
    limit of bundle, snapshot and stop state; `launch_approvals` persons beside the requester;
    `fresh_factor` whether launch needs a second factor, `bound_factor` whether it is bound to the plan;
    `sandbox` the sandbox profile.
    """

    lease_ms: int
    absent_ms: int
    launch_approvals: int
    fresh_factor: bool
    bound_factor: bool
    sandbox: str


PROFILES: dict[Tier, TierProfile] = {
    Tier.NONE: TierProfile(60_000, 600_000, 0, False, False, "standard"),
    Tier.HIGH: TierProfile(30_000, 120_000, 0, True, False, "strict"),
    Tier.CRITICAL: TierProfile(10_000, 10_000, 2, True, True, "strict"),
}


def tier_of(text: object) -> Tier:
    """Return the tier of that name; raises Malformed (``malformed.tier``)."""
    try:
        return Tier(str(text))
    except ValueError:
        raise Malformed(
            "unknown tier", code="tier", next_step="use one of: none, high, critical"
        ) from None


_ORDER = (Tier.NONE, Tier.HIGH, Tier.CRITICAL)


def highest(*tiers: Tier) -> Tier:
    """Return the most dangerous of `tiers`, of which there is at least one."""
    return max(tiers, key=_ORDER.index)


def at_least(tier: Tier, floor: Tier) -> bool:
    """Return whether `tier` is not below `floor`."""
    return _ORDER.index(tier) >= _ORDER.index(floor)
