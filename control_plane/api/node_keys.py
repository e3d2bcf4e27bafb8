"""The node's route for keys: ``POST /node/runs/RUN/ATTEMPT/keys`` (decision 0004 §1)."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from control_plane import key_release
from control_plane.api.context import Body
from control_plane.node_link import peer
from control_plane.parts import parts_of

router = APIRouter(prefix="/node")
Node = Annotated[str, Depends(peer)]


class KeysBody(Body):
    """Nothing: run and attempt stand in the path, the node in its certificate, the rest in our store."""


@router.post("/runs/{run}/{attempt}/keys")
def keys(request: Request, response: Response, node: Node, run: str, attempt: int, _body: KeysBody) -> dict[str, Any]:
    """Return the run key and the file keys of an attempt that is placed on this node and has a live lease."""
    response.headers["cache-control"] = "no-store"
    return key_release.keys_for(parts_of(request), node, run, attempt)
