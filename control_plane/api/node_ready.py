"""A node says that an engine is warm (decision 0004 §5)."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request

from control_plane import engines
from control_plane.api.context import Body
from control_plane.node_link import peer
from control_plane.parts import parts_of

router = APIRouter(prefix="/node")


class ReadyBody(Body):
    """Nothing: run and attempt stand in the path, the node in its certificate."""


@router.post("/runs/{run}/{attempt}/ready")
def ready(request: Request, node: Annotated[str, Depends(peer)], run: str, attempt: int, _body: ReadyBody) -> Any:
    """Take it for a live engine attempt that is placed on this node; the same twice changes nothing."""
    return engines.ready(parts_of(request), node, run, attempt)
