"""How a host becomes a node: one-time secret → node id → certificate and first trust list.

The node id comes from the record of the secret, never from the signing request. The secret is used up by one
statement; the order log's enrolment list has the node before the database has, so a restored database cannot
forget a node that may hold runs.
"""

from typing import Any

from control_plane import trust_list
from control_plane.parts import Parts
from control_plane.signing import bundle_signers
from control_plane.store import nodes
from control_plane.store.db import now_us, writing
from interlock.errors import Untrusted
from interlock.event import Event, EventType
from interlock.signed import public_from_text, public_text


def join(parts: Parts, secret: str, csr: str, supervisor_key: str) -> dict[str, Any]:
    """Return ``{node, certificate, ca, trust}`` for a good secret.

    Raises Untrusted (``untrusted.join_secret``: unknown, used or expired, all in the same words), Malformed,
    Conflict (the id joined before) or Unavailable. A refused join leaves the secret as it was.
    """
    key = public_text(public_from_text(supervisor_key))
    authority = parts.signers.authority
    with writing(parts.engine) as connection:
        node = nodes.use_secret(connection, secret, now_us())
        if node is not None:
            certificate = authority.sign_node(csr, node)
            signers = bundle_signers(parts.settings.places.trust)
            parts.desk.log.enrol(node, key, signers)
            nodes.add(connection, node, key, now_us())
            trust = trust_list.newest(connection)
            parts.ledger.record(Event(EventType.NODE_JOINED, f"node/{node}", facts={
                "node": node, "supervisor_key": key}), connection)
    if node is None:
        parts.desk.note_rarely("join secret", Event(EventType.NODE_REFUSED, "unknown", facts={"why": "join secret"}))
        raise Untrusted("the join secret is unknown, used or expired", code="join_secret",
                        next_step="make a new join file: interlock nodes invite NODE")
    signed = trust_list.signed_for(node, trust, parts.signers, parts.settings, signers)
    return {"node": node, "certificate": certificate, "ca": authority.pem(), "trust": signed.as_json()}
