"""One call of the command: its global options and what they open. Global options stand anywhere before `--`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from control_plane.cli.people_api import PeopleApi
from control_plane.cli.profile import DEFAULT_URL, Profile
from control_plane.cli.terminal import Terminal
from interlock.errors import Untrusted, Usage

StateOption = Annotated[Path | None, typer.Option("--state", help="Where everything is kept.")]
RuntimeOption = Annotated[Path | None, typer.Option("--runtime", help="Sockets, pid files, mounts of runs.")]
_FLAGS = frozenset({"--json"})
_VALUED = frozenset({"--profile", "--url"})


def hoist(argv: Sequence[str]) -> list[str]:
    """Return `argv` with the global options first; what stands behind `--` is never touched."""
    words = list(argv)
    cut = words.index("--") if "--" in words else len(words)
    front: list[str] = []
    rest: list[str] = []
    index = 0
    while index < cut:
        word = words[index]
        if word in _FLAGS or (word.partition("=")[0] in _VALUED and "=" in word):
            front.append(word)
        elif word in _VALUED and index + 1 < cut:
            front += [word, words[index + 1]]
            index += 1
        else:
            rest.append(word)
        index += 1
    return front + rest + words[cut:]


@dataclass
class Invocation:
    """What the commands share: the terminal, the profile, the API under the profile's credential."""

    terminal: Terminal
    profile_name: str = "default"
    url: str = ""
    environ: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    opened: list[PeopleApi] = field(default_factory=list)

    def close(self) -> None:
        """Close every connection that this invocation opened."""
        for api in self.opened:
            api.close()

    @classmethod
    def of(cls, ctx: typer.Context) -> "Invocation":
        """Return the invocation that the root command stored."""
        found = ctx.find_root().obj
        if not isinstance(found, cls):
            raise Usage("the command was started without its root")
        return found

    @property
    def profile(self) -> Profile:
        """Return the profile that was named."""
        return Profile.named(self.profile_name, self.environ)

    def address(self) -> str:
        """Return the control plane's address: --url, INTERLOCK_URL, the profile's, else the default."""
        return str(self.url or self.environ.get("INTERLOCK_URL") or self.profile.load().get("url") or DEFAULT_URL)

    def open_api(self, address: str = "", credential: str = "") -> PeopleApi:
        """Return the API at `address` (default: the usual one); without a credential for login and enrolment."""
        api = PeopleApi(address or self.address(), credential)
        self.opened.append(api)
        return api

    def api(self) -> PeopleApi:
        """Return the API as this profile's person, or under INTERLOCK_API_KEY; raises Untrusted."""
        credential = self.environ.get("INTERLOCK_API_KEY") or self.profile.load().get("session")
        if not credential:
            raise Untrusted("you are not signed in", code="session",
                            next_step=f"interlock login --profile {self.profile_name} NAME")
        return self.open_api(credential=str(credential))

    def person(self) -> str:
        """Return the id of the signed-in person as the control plane knows it."""
        answer: dict[str, Any] = self.api().get("/api/whoami")
        found = answer.get("person", answer.get("id", ""))
        return str(found.get("id", "") if isinstance(found, dict) else found)
