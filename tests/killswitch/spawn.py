"""A minimal launcher and run init for these tests: `spawn.py PIPE PAGE UID CODE PROCS_FILE…`.

The launcher half joins the groups and makes a pid namespace; its child is run init: it waits for GO, starts
the command, and exits on end of file or when the deadline page says so. The real ones are in sandbox/.
"""

import ctypes
import mmap
import os
import select
import signal
import sys
import time


def deadline_ns(page: mmap.mmap) -> int:
    return int.from_bytes(page[8:16], sys.byteorder)


def run_init(pipe: int, page: mmap.mmap, uid: int, code: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if uid:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    begun = False
    while time.clock_gettime_ns(time.CLOCK_BOOTTIME) < deadline_ns(page):
        ready, _, _ = select.select([pipe], [], [], 0.05)
        if ready:
            if os.read(pipe, 1) != b"G":
                os._exit(3)
            if not begun and os.fork() == 0:
                os.close(pipe)
                os.setsid()
                exec(code, {"__name__": "__main__"})  # no exec of a file: the interpreter may lie below a 0700 folder
                os._exit(0)
            begun = True
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
    os._exit(4)


def main() -> None:
    pipe, page_path, uid, code, files = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5:]
    with open(page_path, "rb") as source:
        page = mmap.mmap(source.fileno(), 4096, prot=mmap.PROT_READ)
    if ctypes.CDLL(None, use_errno=True).unshare(0x20000000) != 0:
        sys.exit("no pid namespace")
    home = [os.open(f"{os.path.dirname(p)}/../../../cgroup.procs", os.O_WRONLY) for p in files]
    for path in files:
        with open(path, "w") as out:
            out.write(str(os.getpid()))
    child = os.fork()
    if child == 0:
        os.close(1)
        run_init(pipe, page, uid, code)
    for out in home:  # the launcher itself goes back out: only run init stays
        os.write(out, str(os.getpid()).encode())
        os.close(out)
    os.close(pipe)
    print(child, flush=True)
    os.close(1)
    os.waitpid(child, 0)


main()
