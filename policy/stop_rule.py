"""Who may stop what. Always loaded, small, and free of bundle, gate, ledger, database and locks: a bad bundle
must not be able to deny a stop.

On-call stops any scope; an owner stops his own runs; a service account or a trigger stops one run or one
subject, never everything. No second factor: stopping is the safe direction. A local root needs no rule, his
stop goes straight to the supervisor.
"""

from collections.abc import Set

from interlock.errors import Denied
from interlock.order import Scope, ScopeKind

ON_CALL = "on_call"
NARROW = frozenset({ScopeKind.RUN, ScopeKind.SUBJECT})


def may_stop(roles: Set[str], is_owner: bool, subject_kind: str, scope: Scope) -> bool:
    """Return whether a signed-in subject may give a stop order.

    Args: `roles` of the subject from our store; `is_owner` whether the run or subject of `scope` is his own;
    `subject_kind` ``person`` or anything else (a service account, a trigger); `scope` of the order.
    """
    if subject_kind != "person":
        return scope.kind in NARROW and (is_owner or ON_CALL in roles)
    if ON_CALL in roles:
        return True
    return is_owner and scope.kind in NARROW


def require_stop(roles: Set[str], is_owner: bool, subject_kind: str, scope: Scope) -> None:
    """Raise Denied (``denied.stop``) unless `may_stop`."""
    if not may_stop(roles, is_owner, subject_kind, scope):
        raise Denied(
            f"you may not stop {scope}", code="stop",
            next_step="page the on-call person, who stops any scope; you stop your own runs",
        )
