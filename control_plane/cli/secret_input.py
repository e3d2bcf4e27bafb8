"""Passwords and codes: prompted without echo, from a file, or from one line of stdin in a script."""

import getpass
import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

from interlock.errors import Usage
from interlock.keyfile import read_private


def ask(prompt: str) -> str:
    """Return one secret line from the terminal without echo, or from stdin where there is no terminal.

    Raises Usage (``usage.input``) at the end of input.
    """
    try:
        found = getpass.getpass(prompt) if sys.stdin.isatty() else sys.stdin.readline()
    except EOFError:
        found = ""
    found = found.rstrip("\r\n")
    if not found:
        raise Usage(f"nothing was given for: {prompt.rstrip(': ')}", code="input")
    return found


def password(file: Path | None, *, twice: bool = False) -> str:
    """Return the password from a 0600 file or the prompt; `twice` asks again and compares."""
    if file is not None:
        return read_private(file).decode().rstrip("\r\n")
    found = ask("Password: ")
    if twice and sys.stdin.isatty() and ask("Password again: ") != found:
        raise Usage("the two passwords differ", code="password")
    return found


def codes(given: str | None, environ: MutableMapping[str, str] | None = None) -> Iterator[str]:
    """Yield second-factor codes: `--code`, then INTERLOCK_CODE (each once, a code works once), then prompts."""
    source = os.environ if environ is None else environ
    first = given or source.get("INTERLOCK_CODE")
    if first:
        yield first
    while True:
        yield ask("Code of your authenticator: ")
