"""On which terms a model answers: the service profiles, as named numbers. Pages: docs/formats/engine.md.

Which profile a caller gets is the policy's decision (`infer` or `infer_restricted`); what a profile means stands
here, once, for the gateway that asks and the engine that answers. Neither of them takes it from a request body.
"""

from dataclasses import dataclass
from typing import Any, Self

from interlock.call import number, text
from interlock.errors import Malformed

FULL, RESTRICTED = "full", "restricted"


@dataclass(frozen=True)
class Terms:
    """The bounds of one answer. `max_tokens` of the answer; `tools` whether tool definitions reach the model;
    `withhold` whether links and addresses are cut out of the answer."""

    profile: str
    max_tokens: int
    tools: bool
    withhold: bool

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object that travels to the engine."""
        return {"profile": self.profile, "max_tokens": self.max_tokens, "tools": self.tools, "withhold": self.withhold}

    @classmethod
    def from_json(cls, value: object) -> Self:
        """Parse `as_json`; raises Malformed on anything but exactly these fields."""
        if not isinstance(value, dict) or set(value) != {"profile", "max_tokens", "tools", "withhold"}:
            raise Malformed("a request to an engine carries its terms", code="terms")
        if not isinstance(value["tools"], bool) or not isinstance(value["withhold"], bool):
            raise Malformed("terms hold two yes-or-no fields", code="terms")
        return cls(text(value, "profile", limit=32), number(value, "max_tokens", low=1, high=1 << 20), value["tools"],
                   value["withhold"])


PROFILES: dict[str, Terms] = {
    FULL: Terms(FULL, 4096, tools=True, withhold=False),
    RESTRICTED: Terms(RESTRICTED, 32, tools=False, withhold=True),
}
