"""Joins the console to the people app: routes and static files."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import Response
from starlette.staticfiles import StaticFiles

from control_plane.console import forms, fragments, models, pages

STATIC = Path(__file__).parent / "static"


class _Static(StaticFiles):
    """Vendored files never change under their name within a version: cached for an hour."""

    def file_response(self, *args: object, **kwargs: object) -> Response:
        """Return the file with its cache header."""
        answer = super().file_response(*args, **kwargs)  # type: ignore[arg-type]
        answer.headers["cache-control"] = "public, max-age=3600"
        return answer


def mount(app: FastAPI) -> None:
    """Add the console's routes and its static files to `app`."""
    for module in (pages, models, fragments, forms):
        app.include_router(module.router)
    app.mount("/static", _Static(directory=STATIC), name="static")
