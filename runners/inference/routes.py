"""Every route there is, and the action of the gate that it stands for. A route without one is open on purpose."""

from dataclasses import dataclass
from typing import Literal

from interlock.call import Action
from interlock.errors import Malformed, NotFound, Refusal

Kind = Literal["chat", "completion", "embedding", "models", "health", "document"]


@dataclass(frozen=True)
class Route:
    """`action` None: answered to everybody, and says nothing that is not for everybody."""

    method: str
    path: str
    kind: Kind
    action: Action | None
    summary: str


ROUTES = (
    Route("GET", "/v1/models", "models", Action.INFER, "The models that this caller may call"),
    Route("POST", "/v1/chat/completions", "chat", Action.INFER, "Answer a conversation"),
    Route("POST", "/v1/completions", "completion", Action.INFER, "Go on with a text"),
    Route("POST", "/v1/embeddings", "embedding", Action.INFER, "Make a vector of each text"),
    Route("GET", "/healthz", "health", None, "Whether this gateway serves"),
    Route("GET", "/openapi.json", "document", None, "This document"),
)
_BY_PATH = {route.path: route for route in ROUTES}


def route_of(method: str, path: str) -> Route:
    """Return the route; raises NotFound (``not_found.route``) or Malformed (``malformed.method``)."""
    found = _BY_PATH.get(path)
    if found is None:
        raise NotFound("there is no such route", code="route", next_step="see GET /openapi.json")
    if found.method != method:
        raise wrong_method(found)
    return found


def wrong_method(route: Route) -> Refusal:
    """Return the refusal of another method."""
    return Malformed(f"this route is for {route.method} alone", code="method", next_step=f"use {route.method}",
                     details={"allow": route.method})
