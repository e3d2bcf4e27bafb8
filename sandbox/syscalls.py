"""Numbers of the system calls that the filter names, one table an architecture.

`NEWEST` is the highest number known when this was written; what is above it does not exist for a workload.
Source: include/uapi/asm-generic/unistd.h and arch/x86/entry/syscalls/syscall_64.tbl of the kernel.
"""

NEWEST = 469
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Same number everywhere: since 5.1 new calls are numbered alike on all architectures.
_ALIKE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "open_tree_attr": 467,
}
NUMBERS: dict[str, dict[str, int]] = {
    "x86_64": _ALIKE | {
        "bpf": 321, "keyctl": 250, "add_key": 248, "request_key": 249, "userfaultfd": 323, "ptrace": 101,
        "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312, "mount": 165, "umount2": 166,
        "pivot_root": 155, "name_to_handle_at": 303, "open_by_handle_at": 304, "unshare": 272, "setns": 308,
        "perf_event_open": 298, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175,
        "finit_module": 313, "delete_module": 176, "personality": 135, "syslog": 103, "swapon": 167,
        "swapoff": 168, "acct": 163, "quotactl": 179, "seccomp": 317, "reboot": 169, "settimeofday": 164,
        "clock_settime": 227, "clone": 56, "socket": 41, "ioctl": 16, "chroot": 161, "fanotify_init": 300,
        "fanotify_mark": 301, "lookup_dcookie": 212, "migrate_pages": 256, "move_pages": 279, "mbind": 237,
        "vmsplice": 278, "ioperm": 173, "iopl": 172, "modify_ldt": 154, "uselib": 134, "vhangup": 153,
    },
    "aarch64": _ALIKE | {
        "bpf": 280, "keyctl": 219, "add_key": 217, "request_key": 218, "userfaultfd": 282, "ptrace": 117,
        "process_vm_readv": 270, "process_vm_writev": 271, "kcmp": 272, "mount": 40, "umount2": 39,
        "pivot_root": 41, "name_to_handle_at": 264, "open_by_handle_at": 265, "unshare": 97, "setns": 268,
        "perf_event_open": 241, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105,
        "finit_module": 273, "delete_module": 106, "personality": 92, "syslog": 116, "swapon": 224,
        "swapoff": 225, "acct": 89, "quotactl": 60, "seccomp": 277, "reboot": 142, "settimeofday": 170,
        "clock_settime": 112, "clone": 220, "socket": 198, "ioctl": 29, "chroot": 51, "fanotify_init": 262,
        "fanotify_mark": 263, "lookup_dcookie": 18, "migrate_pages": 238, "move_pages": 239, "mbind": 235,
        "vmsplice": 75, "vhangup": 58,
    },
}

STANDARD = (
    "io_uring_setup", "io_uring_enter", "io_uring_register", "bpf", "keyctl", "add_key", "request_key",
    "userfaultfd", "ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "pidfd_getfd", "mount", "umount2",
    "pivot_root", "move_mount", "open_tree", "open_tree_attr", "fsopen", "fsconfig", "fsmount", "fspick",
    "mount_setattr", "name_to_handle_at", "open_by_handle_at", "unshare", "setns", "perf_event_open",
    "kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module", "personality", "syslog",
    "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "seccomp", "reboot", "settimeofday",
    "clock_settime", "chroot", "fanotify_init", "fanotify_mark", "lookup_dcookie", "ioperm", "iopl",
    "uselib", "vhangup",
)
STRICT = (*STANDARD, "migrate_pages", "move_pages", "mbind", "vmsplice", "process_madvise", "modify_ldt")
SETS: dict[str, tuple[str, ...]] = {"standard": STANDARD, "strict": STRICT}
