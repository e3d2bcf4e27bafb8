"""The supervisor's socket: SOCK_SEQPACKET, root only, one JSON request, one JSON reply (0001-seams §3)."""

import array
import errno
import fcntl
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from interlock.call import number, text
from interlock.errors import Conflict, Malformed, NotFound, Refusal, Unavailable, Untrusted, Usage
from interlock.permit import boottime_ms
from interlock.places import SOCKET_BYTES, too_long
from interlock.signed import Signed
from killswitch.admission import admit, ended, spawned
from killswitch.client import MAX_ANSWER, MAX_BYTES, SEALS
from killswitch.exchange import answer, beats
from killswitch.runs import State
from killswitch.supervisor import Supervisor

_CONNECTIONS = 64
_IDLE_S = 10.0
Reply = dict[str, Any]


def listen(path: Path) -> socket.socket:
    """Return the listening socket, mode 0600.

    Raises Usage (``usage.path``) for a long path, Conflict (``conflict.second_start``) when somebody answers
    there already, Unavailable when it cannot be made.
    """
    if too_long(path):
        raise Usage(f"the socket path {path} is longer than {SOCKET_BYTES} bytes", code="path",
                    next_step="choose a shorter --runtime")
    if _answers(path):
        raise Conflict(f"a supervisor answers on {path} already", code="second_start",
                       next_step="stop it first, or choose another --runtime")
    door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        path.unlink(missing_ok=True)
        door.bind(str(path))
        os.chmod(path, 0o600)
        door.listen(_CONNECTIONS)
    except OSError as error:
        door.close()
        raise Unavailable(f"cannot listen on {path}: {error.strerror}", code="socket") from None
    return door


def hold(runtime: Path) -> int:
    """Take the lock of a runtime folder, which ends with this process; return its descriptor.

    Before anything is looked at or taken away there: two programs that start at once would else each remove
    what the other just made. Raises Conflict (``conflict.second_start``), OSError.
    """
    fd = os.open(runtime / "supervisor.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise Conflict(f"a supervisor runs on {runtime} already", code="second_start",
                       next_step="stop it first, or choose another --runtime") from None
    return fd


def _answers(path: Path) -> bool:
    """Return whether somebody listens at `path`; one who hangs, with a full queue, does too."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True


def peer_uid(connection: socket.socket) -> int:
    """Return the uid of the process at the other end, from the kernel."""
    size = struct.calcsize("3i")
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(uid)


def serve(sup: Supervisor, door: socket.socket) -> None:
    """Accept until the socket is closed; each connection has a thread and asks one thing."""
    slots = threading.BoundedSemaphore(_CONNECTIONS)
    while True:
        try:
            connection, _ = door.accept()
        except OSError as error:
            if error.errno in (errno.EBADF, errno.EINVAL):
                return
            time.sleep(0.05)  # out of descriptors, or an aborted connection: the door stays open
            continue
        slots.acquire()
        try:
            threading.Thread(target=_one, args=(sup, connection, slots), daemon=True, name="door").start()
        except RuntimeError:
            connection.close()
            slots.release()


def _one(sup: Supervisor, connection: socket.socket, slots: threading.BoundedSemaphore) -> None:
    with connection:
        try:
            connection.settimeout(_IDLE_S)
            reply = _reply(sup, connection)
            connection.sendmsg([json.dumps(reply).encode()])
        except OSError:
            pass
        finally:
            slots.release()


def _reply(sup: Supervisor, connection: socket.socket) -> Reply:
    fds: list[int] = []
    try:
        data, fds = _receive(connection)
        if peer_uid(connection) != 0:
            raise Untrusted("only root of this host talks to the supervisor", code="peer")
        request = _parse(data)
        if request.get("memory") is True and request.get("op") == "answer":
            request = {**_parse(_from_memory(fds)), "op": "answer"}
        handler = _OPS.get(str(request.get("op")))
        if handler is None:
            raise Malformed("unknown op", code="op")
        passed, fds = fds, []  # from here on the handler owns them
        return {"ok": True, **handler(sup, request, passed)}
    except Refusal as error:
        return {"ok": False, "error": error.as_json()}
    except Exception as error:  # one request must not harm the program that outlives everything
        print(json.dumps({"error": type(error).__name__, "where": "door"}), file=sys.stderr, flush=True)  # noqa: T201
        return {"ok": False, "error": Unavailable("the supervisor could not do that", code="failed").as_json()}
    finally:
        for fd in fds:
            with suppress(OSError):
                os.close(fd)


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    room = socket.CMSG_SPACE(4 * 4)
    data, extra, flags, _ = connection.recvmsg(MAX_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, payload in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) - len(payload) % fds.itemsize])
    found = list(fds)
    if len(data) > MAX_BYTES or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        for fd in found:
            os.close(fd)
        raise Malformed("the request is larger than 128 KiB or carries too many descriptors", code="size")
    return data, found


def _from_memory(fds: list[int]) -> bytes:
    """Return the request in the one passed descriptor: sealed memory, so it neither blocks nor changes."""
    try:
        sealed = len(fds) == 1 and fcntl.fcntl(fds[0], fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    if not sealed or os.fstat(fds[0]).st_size > MAX_ANSWER:
        raise Malformed("a large answer comes in one descriptor of sealed memory, 8 MiB at most", code="size")
    return os.pread(fds[0], MAX_ANSWER, 0)


def _parse(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise Malformed("the request is not JSON") from None
    if not isinstance(value, dict):
        raise Malformed("the request is not an object")
    return value


def _no_fds(handler: Callable[[Supervisor, dict[str, Any]], Reply]) -> Callable[..., Reply]:
    def closed(sup: Supervisor, request: dict[str, Any], fds: list[int]) -> Reply:
        for fd in fds:
            os.close(fd)
        return handler(sup, request)

    return closed


def _name(request: dict[str, Any]) -> str:
    return f"{text(request, 'run', limit=64)}.{number(request, 'attempt', low=1)}"


def _spawned(sup: Supervisor, request: dict[str, Any], fds: list[int]) -> Reply:
    try:
        name = _name(request)
    except Refusal:
        for fd in fds:
            os.close(fd)
        raise
    return spawned(sup, name, fds)


def _order(sup: Supervisor, request: dict[str, Any]) -> Reply:
    id_, applied = sup.take(Signed.from_json(request.get("order")))
    return {"id": id_, "applied": applied}


def _stop(sup: Supervisor, request: dict[str, Any]) -> Reply:
    return {"id": sup.stop_here(text(request, "scope"), text(request, "reason", empty=True))}


def _receipts(sup: Supervisor, request: dict[str, Any]) -> Reply:
    with sup.lock:
        effect = sup.effects.get(text(request, "order", limit=64))
        if effect is None:
            raise NotFound("no such stop on this host", code="order")
        signed = effect.receipt(sup.store.key, sup.node, sup.boot_id, "") if effect.result else None
        return {**effect.as_json(), "signed": signed.as_json() if signed else None}


def _answer(sup: Supervisor, request: dict[str, Any]) -> Reply:
    found = request.get("answer")
    if not isinstance(found, dict):
        raise Malformed("an answer is an object")
    return {"applied": answer(sup, found)}


def status(sup: Supervisor) -> Reply:
    """Return what `status` shows; ended attempts and cleared ids are cut to the newest."""
    with sup.lock:
        open_ = [r for r in sup.runs.values() if r.state is not State.GONE]
        gone = [r for r in sup.runs.values() if r.state is State.GONE][-50:]
        stops = [{**s.as_json(), "reason": s.reason[:200]} for s in list(sup.state.stops.values())[-50:]]
        return {
            "boot_id": sup.boot_id, "node": sup.node, "complete": sup.store.complete, "floor": sup.state.top,
            "epoch": sup.state.epoch, "stops": stops,
            "stops_total": len(sup.state.stops), "cleared": sorted(sup.state.cleared)[-200:],
            "runs": [r.as_json() for r in [*gone, *open_][-200:]], "link": sup.link, "now_ms": boottime_ms(),
            "pid": os.getpid(), "trust_version": sup.trust.version if sup.trust else 0,
            "key": sup.key_text, "leftovers": sup.leftovers()[:20],
        }


_OPS: dict[str, Callable[..., Reply]] = {
    "admit": _no_fds(lambda sup, request: admit(sup, Signed.from_json(request.get("launch")))),
    "spawned": _spawned,
    "ended": _no_fds(lambda sup, request: ended(sup, _name(request))),
    "status": _no_fds(lambda sup, _: status(sup)),
    "beats": _no_fds(lambda sup, _: beats(sup)),
    "answer": _no_fds(_answer),
    "order": _no_fds(_order),
    "stop": _no_fds(_stop),
    "receipts": _no_fds(_receipts),
}
