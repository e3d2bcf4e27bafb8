"""Our own escape probes: each tries one forbidden thing inside a profile and says how it ended.

Rules. A probe is harmless when it succeeds: it opens but writes nothing, names addresses that belong to
nobody (192.0.2.0/24), stays inside limits it was told, works in a throw-away disk. It prints one word:
BLOCKED, ESCAPED or INVALID. `control` names the layers without which it must print ESCAPED; without that
proof its BLOCKED would say nothing. What happens on the host if it works: nothing, by construction.
"""

from dataclasses import dataclass

_HEAD = """\
import ctypes, os, socket, sys
C = ctypes.CDLL(None, use_errno=True)
def sc(n, *a):
    r = C.syscall(ctypes.c_long(n), *[ctypes.c_long(x) for x in a])
    if r < 0:
        e = ctypes.get_errno()
        raise OSError(e, os.strerror(e))
    return r
def reached(f, ok):
    try:
        return f()
    except OSError as e:
        if e.errno not in ok:
            raise
        return True
def attempt():
"""
_TAIL = """
try:
    d = attempt()
except OSError as e:
    print("BLOCKED", e.errno, flush=True)
except BaseException as e:
    print("INVALID", type(e).__name__, e, flush=True)
else:
    print("BLOCKED refused" if d is False else "ESCAPED", flush=True)
"""


@dataclass(frozen=True)
class Probe:
    """One attempt. `body` is the Python of `attempt()`, with ``{call}`` for system-call numbers; `control`
    the layers to remove for the positive control; `void_with_unix` whether it means nothing where AF_UNIX is open,
    `void_with_ranks` where several ranks may read the addresses of their own network namespace."""

    id: str
    why: str
    body: str
    control: tuple[str, ...]
    void_with_unix: bool = False
    void_with_ranks: bool = False

    def code(self, numbers: dict[str, int], pids: int, inodes: int, disk_mb: int) -> str:
        """Return the program, with the numbers of this architecture and the limits under test."""
        values = {**numbers, "PIDS": pids, "INODES": inodes, "DISK_MB": disk_mb}
        body = self.body
        for name, value in values.items():
            body = body.replace("{" + name + "}", str(value))
        return _HEAD + "".join(f"    {line}\n" for line in body.splitlines()) + _TAIL


PROBES = (
    Probe("host-files", "files of the host can be listed", "return os.listdir('/var') is not None", ("mounts",)),
    Probe("root-write", "the root inside can be written",
          "os.close(os.open('/', os.O_TMPFILE | os.O_RDWR, 0o600))", ("root_read_only",)),
    Probe("dev-write", "files can be made in /dev, outside every limit",
          "os.close(os.open('/dev', os.O_TMPFILE | os.O_RDWR, 0o600))", ("dev_read_only",)),
    Probe("protected-names", "a hook can be planted in the workspace",
          "os.makedirs('/work/.git/hooks')", ("masks",)),
    Probe("landlock-files", "files outside the writable places can be opened for writing",
          "os.close(os.open('/proc/self/comm', os.O_WRONLY))", ("landlock",)),
    Probe("user-namespace", "a further user namespace gives capabilities back",
          "return sc({unshare}, 0x10000000) == 0", ("filter", "userns_limit")),
    Probe("clone-namespace", "clone makes a user namespace",
          "p = sc({clone}, 0x10000000 | 17, 0, 0, 0, 0)\nif p == 0: os._exit(0)\nos.waitpid(p, 0)",
          ("filter", "userns_limit")),
    Probe("clone3", "clone3 hides its flags from a filter",
          "return reached(lambda: sc({clone3}, 0, 0), (22, 14, 7))", ("filter",)),
    Probe("ptrace", "a process can be traced", "return sc({ptrace}, 0, 0, 0, 0) == 0", ("filter",)),
    Probe("keyring", "keys of the kernel can be read", "return sc({keyctl}, 0, -3, 1) > 0", ("filter",)),
    Probe("io-uring", "calls go round the filter by io_uring",
          "return reached(lambda: sc({io_uring_setup}, 1, 0), (14, 22))", ("filter",)),
    Probe("userfaultfd", "page faults can be stalled from user space",
          "os.close(sc({userfaultfd}, 1))", ("filter",)),
    Probe("personality", "the execution domain can be changed", "return sc({personality}, 0xffffffff) >= 0",
          ("filter",)),
    Probe("terminal-input", "keys can be typed into a terminal, high bits set too",
          "import fcntl, termios\nm, s = os.openpty()\nif os.fork() == 0:\n"
          "    os.setsid()\n    fcntl.ioctl(s, termios.TIOCSCTTY, 0)\n    r = 0\n"
          "    for n in (0x5412, 0x1_0000_5412):\n"
          "        try: r |= sc({ioctl}, s, n, ctypes.addressof(ctypes.create_string_buffer(b' '))) == 0\n"
          "        except OSError as e: r |= e.errno == 5\n    os._exit(int(r))\n"
          "return os.wait()[1] != 0", ("filter",)),
    Probe("unix-socket", "programs of the host can be reached by a socket",
          "socket.socket(socket.AF_UNIX).close()", ("filter",), void_with_unix=True),
    Probe("netlink", "the network can be configured or watched",
          "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()", ("filter",), void_with_ranks=True),
    Probe("netlink-other", "parts of the kernel can be reached that only netlink speaks to",
          "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 16).close()", ("filter",)),
    Probe("network", "an address outside has a route",
          "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.connect(('192.0.2.1', 9))", ("network",)),
    Probe("capabilities", "capabilities are left in a set",
          "rows = [r.split() for r in open('/proc/self/status') if r.startswith('Cap')]\n"
          "return any(int(v, 16) for _, v in rows)", ("capabilities",)),
    Probe("init-memory", "the deadline can be rewritten in run init's memory",
          "if os.fork() == 0:\n    try: os.open('/proc/1/mem', os.O_RDONLY)\n    except OSError: os._exit(0)\n"
          "    os._exit(1)\nreturn os.wait()[1] != 0", ("init",)),
    Probe("descriptors", "descriptors of the launcher are open inside",
          "n = 0\nfor i in range(3, 256):\n    try: os.fstat(i); n += 1\n    except OSError: pass\nreturn n > 0",
          ("closed_descriptors",)),
    Probe("processes", "processes of the host can be seen",
          "return sum(p.isdigit() for p in os.listdir('/proc')) > 6", ("pid_namespace",)),
    Probe("pids", "more tasks than the limit",
          "n = 0\nr, w = os.pipe()\ntry:\n    for _ in range({PIDS}):\n        if os.fork() == 0:\n"
          "            os.close(w); os.read(r, 1); os._exit(0)\n        n += 1\nexcept OSError:\n    pass\n"
          "finally:\n    os.close(w)\nreturn n >= {PIDS}", ("bounds",)),
    Probe("inodes", "more files than the limit",
          "n = 0\nos.mkdir('/tmp/i')\ntry:\n    for n in range({INODES}): os.mknod('/tmp/i/%d' % n, 0o600)\n"
          "except OSError as e:\n    return False if e.errno == 28 else e", ("bounds",)),
    Probe("disk", "more bytes than the limit, over several files",
          "b = b'x' * (1 << 20)\nfor n in range({DISK_MB} + 1):\n"
          "    with open('/dev/shm/d%d' % n, 'wb') as f: f.write(b)",
          ("bounds",)),
)
