"""One connection of a guest at the broker: what is sent on it, and how it is turned away."""

import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from interlock import wire
from interlock.errors import Refusal
from runners.guest import Answer, Guest

FOREVER_MS = 1 << 62


@dataclass
class Line:
    """One accepted connection. It has until `until_ms` to ask; one that `waits` for its reply is not read again."""

    guest: Guest
    socket: socket.socket
    until_ms: int
    waits: bool = False

    @property
    def open(self) -> bool:
        """Return whether we have not hung up."""
        return self.socket.fileno() >= 0


def peer_uid(peer: socket.socket) -> int:
    """Return the uid of the process that connected, as the host sees it."""
    _, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return int(uid)


def send(peer: socket.socket, answer: Answer) -> None:
    """Send a reply with the descriptor that it brings, if any, and close our copy of that."""
    try:
        data = wire.encode({"ok": True, **answer.fields})
        socket.send_fds(peer, [data], [] if answer.fd < 0 else [answer.fd])
    except Refusal as refusal:  # our own reply is too large: said, not dropped
        refuse(peer, refusal)
    except OSError:
        pass  # it did not wait for the answer: its loss
    finally:
        drop(answer)


def drop(answer: Answer) -> None:
    """Close the descriptor of a reply that is not sent."""
    if answer.fd >= 0:
        os.close(answer.fd)
        answer.fd = -1


def refuse(peer: socket.socket, refusal: Refusal) -> None:
    """Send a refusal; a peer that is gone is no error."""
    with suppress(OSError):
        peer.send(wire.encode(_error(refusal)))


def _error(refusal: Refusal) -> dict[str, Any]:
    return {"ok": False, "error": refusal.as_json()}


def turn_away(peer: socket.socket, refusal: Refusal) -> None:
    """Send a refusal and hang up. What the peer had sent is read first: a close with unread data resets the
    connection, and the refusal would be lost."""
    try:
        peer.shutdown(socket.SHUT_RD)
        while peer.recv(wire.LIMIT + 1):
            pass
    except OSError:
        pass
    refuse(peer, refusal)
    peer.close()
