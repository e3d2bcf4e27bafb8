"""Runs inside the sandbox and does not want to end: ignores signals, detaches, forks without end.

It says `hostile: N processes` when the kernel lets it have no more, and goes on trying.
"""

import os
import signal
import sys
import time

for number in range(1, signal.NSIG):
    if number not in (signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD):
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            continue
signal.signal(signal.SIGCHLD, signal.SIG_IGN)


def stay() -> None:
    """Be a process that leaves its session and never ends."""
    os.setsid()
    if os.fork():  # the second fork: no parent, no session
        os._exit(0)
    while True:
        time.sleep(1)


def main() -> None:
    """Fork until the limit; say so; go on for ever."""
    alive, said = 1, False
    while True:
        try:
            if os.fork() == 0:
                try:
                    stay()
                finally:
                    os._exit(1)
            alive += 1
        except OSError:
            if not said:
                print(f"hostile: {alive} processes started, signals ignored, and I go on", flush=True)
                said = True
            time.sleep(0.2)
        if alive > 100_000:
            sys.exit("no limit stopped me")


main()
