"""Proof of a fresh second factor for ONE action on ONE object, used once, at most 5 minutes old.

Rules: bound to session, action and digest; the code behind it is used up for everything else (totp.py); the
proof itself is used up by one statement right after the gate said yes, so that a call which was refused for
another reason keeps it and no two calls share it. An API key never has one.
"""

from sqlalchemy import Connection

from control_plane.auth import totp
from control_plane.store import people
from control_plane.store import sessions as rows
from control_plane.store.db import now_us
from interlock.call import Action, new_id
from interlock.errors import StepUpRequired

LIFE_US = 300_000_000


def prove(
    connection: Connection, kek: bytes, session: str, person: people.Person, code: str, action: Action, bound: str
) -> str:
    """Use `code` up and return the id of a proof for `action` on the digest `bound` in this session.

    Raises Untrusted (``untrusted.factor``).
    """
    totp.accept(connection, kek, person, code)
    proof = rows.Proof(new_id("stp"), session, action.value, bound, now_us(), 0)
    rows.add_proof(connection, proof)
    return proof.id


def _missing(reason: str) -> StepUpRequired:
    return StepUpRequired(
        f"a fresh second factor is needed: {reason}", next_step="POST /api/step-up with a new code for this very object"
    )


def shown(connection: Connection, proof: str, session: str, action: Action, bound: str) -> rows.Proof:
    """Return the proof when it serves exactly this session, action and digest and is fresh and unused.

    Raises StepUpRequired.
    """
    found = rows.proof_of(connection, proof)
    if found is None or found.session != session or found.action != action.value or found.bound != bound:
        raise _missing("the proof is for something else")
    if found.used_us or not 0 <= now_us() - found.at_us <= LIFE_US:
        raise _missing("the proof was used or is older than 5 minutes")
    return found


def use(connection: Connection, proof: rows.Proof) -> None:
    """Use the proof up in one statement; raises StepUpRequired when another call was faster."""
    if not rows.use_proof(connection, proof, now_us()):
        raise _missing("the proof was used or is older than 5 minutes")
