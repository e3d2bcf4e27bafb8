"""What a decision may know beside the call. Filled from our store or the transport, never from a body."""

from dataclasses import dataclass
from typing import Any, Literal

FRESH_MS = 300_000
NEVER_MS = 2**52  # the age of what was never confirmed; it decides nothing
EVERYONE = "everyone"
ANONYMOUS = "anonymous"  # the role of a caller who shows no key; he is not "everyone", who is whoever signed in


@dataclass(frozen=True)
class Facts:
    """Facts of one decision.

    Args: `roles` of the subject in his tenant; `mfa_age_ms` milliseconds since the last second factor, None
    when there was none; `mfa_bound` the digest that the factor was given for; `approvals` how many OTHER
    persons approved the call's `bound` digest; `programmes` partner programmes with a live membership;
    `bundle_age_ms` milliseconds since bundle, snapshot and stop state were last confirmed, counted from the
    sending of that question (left out: never, which permits nothing); `state` of the site; `own` whether the
    resource is the subject's own.
    """

    roles: frozenset[str] = frozenset()
    mfa_age_ms: int | None = None
    mfa_bound: str = ""
    approvals: int = 0
    programmes: frozenset[str] = frozenset()
    bundle_age_ms: int = NEVER_MS
    state: Literal["ready", "bootstrap"] = "ready"
    own: bool = False

    @property
    def factor_fresh(self) -> bool:
        """Return whether a second factor was given within the last 5 minutes."""
        return self.mfa_age_ms is not None and 0 <= self.mfa_age_ms <= FRESH_MS

    def factor_bound(self, bound: str) -> bool:
        """Return whether a fresh factor was given for exactly the digest `bound`."""
        return self.factor_fresh and bound != "" and self.mfa_bound == bound

    def held(self, bound: str) -> frozenset[str]:
        """Return the names of the conditions of a policy file that hold for a call about `bound`."""
        found = {f"programme:{name}" for name in self.programmes}
        for name, holds in (
            ("own", self.own), ("mfa", self.factor_fresh), ("mfa_bound", self.factor_bound(bound)),
            ("two_persons", self.approvals >= 2),
        ):
            if holds:
                found.add(name)
        return frozenset(found)

    def as_json(self) -> dict[str, Any]:
        """Return the canonical JSON object that goes into the record of a decision."""
        return {
            "roles": sorted(self.roles), "mfa_age_ms": self.mfa_age_ms, "mfa_bound": self.mfa_bound,
            "approvals": self.approvals, "programmes": sorted(self.programmes),
            "bundle_age_ms": self.bundle_age_ms, "state": self.state, "own": self.own,
        }
