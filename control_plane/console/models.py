"""The pages of models: the list, and one model with its versions, where they come from and what serves them."""

from typing import Any

from fastapi import APIRouter, Request, Response

from control_plane.api import registry
from control_plane.api.context import Caller, declare
from control_plane.api.registry import Name
from control_plane.console import curve
from control_plane.console.view import PageRoute, glance, reader, render
from interlock.call import Action

router = APIRouter(route_class=PageRoute, include_in_schema=False)
NEXT = {"draft": "submit", "approved": "serve"}

declare({
    ("GET", "/models"): Action.LOOK, ("GET", "/models/{name}"): Action.LOOK,
    ("GET", "/fragments/models"): Action.LOOK, ("GET", "/fragments/models/{name}"): Action.LOOK,
})


@router.get("/models")
def model_list(request: Request) -> Response:
    """Show the models that the reader may see."""
    caller = reader(request)
    return render(request, "models.html", caller, here="/models", models=_rows(request, caller))


@router.get("/fragments/models")
def refreshed_list(request: Request) -> Response:
    """Refresh the list of models."""
    caller = glance(request, "models")
    return render(request, "_models.html", caller, models=_rows(request, caller))


@router.get("/models/{name}")
def one_model(request: Request, name: Name) -> Response:
    """Show one model: each version with digest, state, lineage and engines."""
    caller = reader(request)
    return render(request, "model.html", caller, here="/models", model=_model(request, caller, name))


@router.get("/fragments/models/{name}")
def refreshed_model(request: Request, name: Name) -> Response:
    """Refresh one model."""
    caller = glance(request, "model")
    return render(request, "_model.html", caller, model=_model(request, caller, name))


def _rows(request: Request, caller: Caller) -> list[dict[str, Any]]:
    return [{**m, "newest": m["versions"][0] if m["versions"] else None} for m in registry.visible(request, caller)]


def _model(request: Request, caller: Caller, name: str) -> dict[str, Any]:
    """Return a model whose parents have names, as far as the reader may see them."""
    shown = registry.one(request, caller, name)
    known = {v["version"]: v for m in registry.visible(request, caller) for v in m["versions"]}
    return {**shown, "versions": [{
        **v, "size": curve.size(v["bytes"]), "next": NEXT.get(v["state"], ""),
        "parents": [_parent(known.get(digest), digest) for digest in v["lineage"]["parents"]],
        "datasets": [(path, v["lineage"].get("dataset_digests", {}).get(path, ""))
                     for path in v["lineage"]["datasets"]], "code": v["lineage"]["code"],
    } for v in shown["versions"]]}


def _parent(known: dict[str, Any] | None, digest: str) -> dict[str, Any]:
    """Return what names a parent version; one that the reader may not see has its digest alone."""
    if known is None:
        return {"digest": digest, "path": "", "label": f"{digest[:19]}…"}
    label = f"{known['model']}@{known['number']}"
    return {"digest": digest, "path": f"/models/{known['model']}#v{known['number']}", "label": label}
