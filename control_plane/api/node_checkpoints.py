"""The node's route for committed checkpoints: ``POST /node/runs/RUN/ATTEMPT/checkpoints`` (decision 0004 §2).

A node reports the manifest that its broker wrote. It counts when the attempt is placed on that node and the MAC is
by that run's key, which only its broker and this control plane have had. A stop changes nothing here: what was
committed before it is known, and who may load it is another question. The record ``checkpoint.committed`` is the
broker's own; there is no second one.
"""

import base64
import binascii
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from control_plane.api.context import Body
from control_plane.lifecycle import own_attempt
from control_plane.node_link import peer
from control_plane.parts import Parts, parts_of
from control_plane.store import checkpoints, run_keys
from control_plane.store.db import now_us, reading, writing
from interlock import manifest
from interlock.errors import Malformed, NotFound, Untrusted
from kms.envelope import RunKey

router = APIRouter(prefix="/node")
Node = Annotated[str, Depends(peer)]


class CheckpointBody(Body):
    """A manifest as it lies in the store, in base64."""

    manifest: str


@router.post("/runs/{run}/{attempt}/checkpoints")
def committed(request: Request, node: Node, run: str, attempt: int, body: CheckpointBody) -> dict[str, Any]:
    """Keep a committed checkpoint, once; return its digest. Repeating is safe."""
    return {"digest": take(parts_of(request), node, run, attempt, _decode(body.manifest))}


def take(parts: Parts, node: str, run: str, attempt: int, data: bytes) -> str:
    """Verify a manifest and keep it; returns its digest.

    Raises NotFound (attempt, ``not_found.run_key``), Denied (another node's), Untrusted (``untrusted.manifest``),
    Malformed, Unavailable (the key provider).
    """
    claimed = manifest.read(data)
    if (claimed.run, claimed.attempt) != (run, attempt):
        raise Untrusted("the manifest is of another run or attempt", code="manifest")
    digest = claimed.digest()
    with reading(parts.engine) as connection:
        own_attempt(connection, node, run, attempt)
        known = checkpoints.one(connection, digest)
        kept = run_keys.one(connection, run)
    if known is not None and bytes(known.manifest) == data:
        return digest
    found = _verified(parts, data, kept)
    with writing(parts.engine) as connection:
        own_attempt(connection, node, run, attempt)
        checkpoints.add(
            connection, digest=digest, run=run, step=found.step, attempt=attempt, kind=found.kind, items=found.items,
            bytes=sum(f.size for f in found.files), parent=found.parent or "", node=node, manifest=data,
            committed_us=now_us(),
        )
    return digest


def _verified(parts: Parts, data: bytes, kept: RunKey | None) -> manifest.Manifest:
    """Return the manifest when its MAC is by that run key. The provider is asked outside of any transaction."""
    if kept is None:
        raise NotFound("that run has no run key, so it commits no checkpoints", code="run_key",
                       next_step="restore the database: the key of a run is kept with the run")
    return manifest.verify(data, parts.keys.named(kept.wrapped.provider).unwrap(kept.wrapped, kept.context))


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise Malformed("not base64", code="base64") from None
