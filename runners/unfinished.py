"""Calls that were open when a gateway died: each gets its end on record, which says that nobody knows it.

A decision to answer is durable before an engine is asked; its answer's record comes at the end. A process that is
killed leaves the first without the second, and an auditor could not tell that from a record that was left out.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from audit import segment
from audit.leaf import decode
from interlock.call import Action
from interlock.errors import Refusal
from interlock.event import Event, EventType
from runners.inference.dispatch import PROFILE_OF

STREAM, UNKNOWN = "gateway", "unknown"
NEWEST = 2  # segments of a stream: what began before them and was still open is longer than any call
_ENDS = (EventType.INFERRED.value, EventType.INFER_REFUSED.value)


def unfinished(folder: Path) -> list[Event]:
    """Return an `infer.answered` of outcome ``unknown`` for each call in the spool `folder` that has no end.

    The spool must be ours already: then no other gateway writes there. What cannot be read is left out, and said.
    """
    found: dict[str, dict[str, Any]] = {}
    for event in _events(folder):
        call = event.get("call", "")
        if event["type"] in _ENDS:
            found.pop(call, None)
        elif event["type"] == EventType.CALL_DECIDED.value and _allowed(event):
            found[call] = event
    return [_end(event) for event in found.values()]


def _events(folder: Path) -> Iterator[dict[str, Any]]:
    for each in segment.streams(folder):
        if each.name != STREAM:
            continue
        try:
            with segment.opened(folder, each.stream) as fd:
                for first in segment.segments(fd)[-NEWEST:]:
                    for body in segment.read(fd, first).bodies:
                        yield decode(body).event
        except (OSError, Refusal) as fault:
            sys.stderr.write(f'{{"error": "records of a gateway cannot be read: {type(fault).__name__}"}}\n')


def _allowed(event: dict[str, Any]) -> bool:
    facts = event["facts"]
    return facts["decision"]["effect"] == "allow" and facts["call"]["action"] in PROFILE_OF


def _end(event: dict[str, Any]) -> Event:
    call = event["facts"]["call"]
    return Event(EventType.INFERRED, event["actor"], event["tenant"], event.get("run", ""), event["call"], {
        "outcome": UNKNOWN, "decision": event["id"], "model": call["resource"]["name"], "version": call["bound"],
        "tier": call["resource"]["tier"], "profile": PROFILE_OF[Action(call["action"])],
        "source_ip": call["source_ip"], "person": call["subject"]["person"],
    })
