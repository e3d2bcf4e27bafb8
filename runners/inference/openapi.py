"""The OpenAPI document, written out from the tables that the gateway itself obeys."""

from functools import cache
from typing import Any

from runners.inference import parameters
from runners.inference.frames import INPUTS, MESSAGES, ROLES, STOPS, TOOLS
from runners.inference.routes import ROUTES, Route

_TEXTS = {"type": "array", "items": {"type": "string"}}
_SAMPLING: dict[str, Any] = {
    "model": {"type": "string"}, "max_tokens": {"type": "integer", "minimum": 1, "maximum": parameters.MOST_TOKENS},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1},
    "stop": {"oneOf": [{"type": "string"}, {**_TEXTS, "maxItems": STOPS}]}, "seed": {"type": "integer", "minimum": 0},
    "stream": {"type": "boolean"},
    "stream_options": {"type": "object", "properties": {"include_usage": {"type": "boolean"}}},
}
_MESSAGE = {"type": "object", "required": ["role", "content"], "properties": {
    "role": {"enum": sorted(ROLES)}, "content": {"oneOf": [{"type": "string"}, {"type": "array"}]}}}
_BODIES: dict[str, dict[str, Any]] = {
    "chat": {"required": ["model", "messages"], "properties": {
        **_SAMPLING, "max_completion_tokens": _SAMPLING["max_tokens"],
        "messages": {"type": "array", "minItems": 1, "maxItems": MESSAGES, "items": _MESSAGE},
        "tools": {"type": "array", "maxItems": TOOLS, "items": {"type": "object"}}}},
    "completion": {"required": ["model", "prompt"], "properties": {**_SAMPLING, "prompt": {"type": "string"}}},
    "embedding": {"required": ["model", "input"], "properties": {
        "model": {"type": "string"}, "encoding_format": {"enum": ["float", "base64"]},
        "input": {"oneOf": [{"type": "string"}, {**_TEXTS, "minItems": 1, "maxItems": INPUTS}]}}},
}
_ERROR = {"type": "object", "properties": {"error": {"type": "object", "properties": {
    "message": {"type": "string"}, "type": {"type": "string"}, "code": {"type": "string"},
    "param": {"type": ["string", "null"]}, "next_step": {"type": "string"}}}}}
_REFUSALS = {
    "401": "the API key is not valid", "403": "policy denies it, or the profile does not give it",
    "404": "no such model for this caller", "422": "the body cannot be read", "423": "a stop order covers it",
    "429": "too many calls", "502": "the engine went away", "503": "no engine, or no record can be made",
}


@cache
def document() -> dict[str, Any]:
    """Return the document."""
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    key = {"type": "http", "scheme": "bearer", "bearerFormat": "interlock_sk_…"}
    return {
        "openapi": "3.1.0", "info": {"title": "Interlock gateway", "version": "1"}, "paths": paths,
        "components": {"securitySchemes": {"key": key}, "schemas": {"Error": _ERROR}},
    }


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": route.kind, "summary": route.summary, "responses": {"200": {"description": "the answer"}},
        "x-interlock-action": None if route.action is None else route.action.value,
    }
    if route.action is not None:
        found["security"] = [{"key": []}, {}]
        error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
        found["responses"].update({
            status: {"description": words, "content": error}
            for status, words in _REFUSALS.items()
        })
    if route.kind in _BODIES:
        schema = {"type": "object", "additionalProperties": False, **_BODIES[route.kind]}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return found
