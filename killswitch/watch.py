"""The supervisor as a program: protect itself, sweep, serve, watch; end cleanly on SIGTERM."""

import ctypes
import json
import os
import resource
import select
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import FrameType

from interlock.errors import Unavailable
from interlock.places import too_long
from killswitch import alarm
from killswitch.door import hold, listen, serve
from killswitch.latch import watch as watch_folder
from killswitch.link import Link
from killswitch.supervisor import Supervisor

TICK_S = 0.05
_LIBC = ctypes.CDLL(None, use_errno=True)
_MCL_CURRENT, _MCL_FUTURE, _MCL_ONFAULT = 1, 2, 4


def protect() -> None:
    """Keep this process alive when memory is short; best effort, each by itself."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("-1000")
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -10)
    with suppress(OSError, ValueError):  # each live run holds three descriptors
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    _LIBC.mlockall(_MCL_CURRENT | _MCL_FUTURE | _MCL_ONFAULT)


def run(state: Path, runtime: Path, on_unconfirmed: str | None) -> int:
    """Run the supervisor until SIGTERM or SIGINT; return the exit status.

    Raises Unavailable without root, Conflict on a second start, LayerMissing without control groups,
    Untrusted or Malformed for keys, trust list or settings that are off.
    """
    if os.geteuid() != 0:
        raise Unavailable("the supervisor needs root", code="root", next_step="start it as root, or by systemd")
    os.umask(0o022)
    threading.stack_size(512 * 1024)
    path = runtime / "supervisor.sock"
    sup, door = _open(state, runtime, path, on_unconfirmed)
    protect()
    sup.tree.enter("supervisor")
    sup.start()
    stop = _on_signals()
    watcher = threading.Thread(target=_watch, args=(sup, stop), name="watch")
    watcher.start()
    threading.Thread(target=serve, args=(sup, door), daemon=True, name="serve").start()
    Link(sup, state / "node").start()
    print(json.dumps({"ready": "killswitch", "socket": str(path), "pid": os.getpid()}), flush=True)  # noqa: T201
    watcher.join()
    path.unlink(missing_ok=True)
    sup.close()
    door.close()
    return 0


def _open(state: Path, runtime: Path, path: Path, on_unconfirmed: str | None) -> tuple[Supervisor, socket.socket]:
    """Take both locks, then the socket; nothing of ours stays behind when one of it is refused."""
    if too_long(path):
        listen(path)  # which refuses, before any folder is made
    door: socket.socket | None = None
    try:
        state.mkdir(mode=0o755, parents=True, exist_ok=True)
        runtime.mkdir(mode=0o755, parents=True, exist_ok=True)
        hold(runtime)
        door = listen(path)
        hook = alarm.command(on_unconfirmed, state / "supervisor" / "settings.json")
        return Supervisor(state, runtime, hook), door
    except BaseException as error:
        if door is not None:
            path.unlink(missing_ok=True)
            door.close()
        if isinstance(error, OSError):
            raise Unavailable(f"state or runtime cannot be written: {error.strerror}", code="disk",
                              next_step="make room, or choose another --state or --runtime") from None
        raise


def _on_signals() -> int:
    """Return the reading end of a pipe that becomes readable when the program shall end.

    The interpreter's own C handler writes to it: the kernel may give a signal to any thread, and a handler in
    Python runs only once the main thread, which waits, happens to wake up.
    """

    def nothing(_signal: int, _frame: FrameType | None) -> None:
        return

    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, nothing)
    return reading


def _watch(sup: Supervisor, stop: int) -> None:
    """Tick until told to end. An accident in here ends the program: the pipes close, the runs end."""
    try:
        inotify = watch_folder(sup.store.latch)
        waiting = [stop, *([inotify] if inotify is not None else [])]
        while True:
            ready, _, _ = select.select(waiting, [], [], TICK_S)
            if stop in ready:
                return
            if inotify in ready and inotify is not None:
                os.read(inotify, 65536)
                sup.look()
            sup.tick()
    except BaseException:
        traceback.print_exc(file=sys.stderr)
        os._exit(70)
