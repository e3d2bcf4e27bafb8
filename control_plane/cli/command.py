"""The words of the `interlock` command, and how a refusal ends it.

Global options (`--json`, `--profile`, `--url`) stand anywhere before `--`.
"""

import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.exceptions import TyperException

from control_plane.cli import (
    account,
    bundles,
    doctor,
    down,
    evidence,
    halt,
    launch,
    models,
    partners,
    runs,
    site,
    train,
    trust,
    up,
    votes,
)
from control_plane.cli.invocation import Invocation, hoist
from control_plane.cli.terminal import Terminal
from interlock.errors import Refusal, Unavailable, Usage

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
                  help="Interlock: nothing runs without a live authorization, everything leaves evidence, "
                       "anything can be stopped.")

_Words = dict[str, Callable[..., Any]]
_LOCAL: _Words = {"up": up.up, "down": down.down, "doctor": doctor.doctor, "bootstrap": up.bootstrap}
_PEOPLE: _Words = {
    "login": account.login, "logout": account.logout, "whoami": account.whoami, "enrol": account.enrol,
    "invite": account.invite,
}
_WORK: _Words = {
    "run": launch.run, "train": train.train, "restart": launch.restart, "runs": runs.runs,
    "logs": runs.logs, "files": runs.files, "why": runs.why,
}
_BEHIND = {"run": "the command of a run", "train": "the training script"}
_STOP: _Words = {"stop": halt.stop, "stops": halt.stops, "resume": halt.resume}
_VOTES: _Words = {"approvals": votes.approvals, "approve": votes.approve, "refuse": votes.refuse}
_SITE: _Words = {"status": site.status}

for _panel, _commands in (("This machine", _LOCAL), ("People", _PEOPLE), ("Runs", _WORK), ("Stop", _STOP),
                          ("Approvals", _VOTES), ("Site", _SITE)):
    for _name, _command in _commands.items():
        app.command(_name, rich_help_panel=_panel)(_command)
app.add_typer(account.people, name="people", rich_help_panel="People")
app.add_typer(account.keys, name="keys", rich_help_panel="People")
app.add_typer(partners.partner, name="partner", rich_help_panel="People")
app.add_typer(models.model, name="model", rich_help_panel="Models")
app.add_typer(site.nodes, name="nodes", rich_help_panel="Site")
app.add_typer(trust.trust, name="trust", rich_help_panel="Approvals")
app.add_typer(bundles.policy, name="policy", rich_help_panel="Site")
app.add_typer(evidence.audit, name="audit", rich_help_panel="Site")


def _say_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"interlock {version('interlock-server')}\n")
        raise typer.Exit


@app.callback()
def root(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    profile: Annotated[str, typer.Option("--profile", envvar="INTERLOCK_PROFILE", help="Who you are.")] = "default",
    url: Annotated[str, typer.Option("--url", help="Address of the control plane (or INTERLOCK_URL).")] = "",
    _version: Annotated[bool, typer.Option("--version", callback=_say_version, is_eager=True,
                                           help="Print the version and end.")] = False,
) -> None:
    """Interlock: nothing runs without a live authorization, everything leaves evidence, anything can be stopped."""
    ctx.obj = Invocation(Terminal(as_json), profile, url)
    ctx.call_on_close(ctx.obj.close)


def execute(argv: Sequence[str]) -> int:
    """Run one command line; return its exit status. Refusals become code, sentence and next step."""
    words = hoist(argv)
    terminal = Terminal("--json" in words[: words.index("--")] if "--" in words else "--json" in words)
    try:
        word = _command_of(words)
        if word in _BEHIND and "--" not in words and "--help" not in words:
            raise Usage(f"{_BEHIND[word]} stands behind --", code=word, next_step=f"interlock {word} -- …")
        status = typer.main.get_command(app).main(args=words, prog_name="interlock", standalone_mode=False)
        return status if isinstance(status, int) else 0
    except Refusal as refusal:
        return terminal.refuse(refusal)
    except TyperException as error:
        return terminal.refuse(Usage(error.format_message() or "a command is missing", next_step="interlock --help"))
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        return terminal.refuse(Unavailable(f"{error.filename or 'the system'}: {error.strerror}", code="system"))


def _command_of(words: Sequence[str]) -> str:
    rest = iter(words)
    for word in rest:
        if word in ("--profile", "--url"):
            next(rest, None)
        elif not word.startswith("-"):
            return word
    return ""
