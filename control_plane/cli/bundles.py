"""`interlock policy`: keygen, check, sign (on the author's machine), publish (an administrator).

A private signing key never travels: this file signs locally and sends only the signed archive.
"""

import base64
from pathlib import Path
from typing import Annotated

import typer

from control_plane.cli.invocation import Invocation
from control_plane.cli.new_file import write_new
from control_plane.cli.terminal import cell, fields, table, when
from interlock.canon import digest_bytes
from interlock.errors import Malformed, Unavailable
from interlock.keyfile import read_ed25519
from interlock.signed import key_id, public_from_text

policy = typer.Typer(no_args_is_help=True, help="Policy bundles: signed by their authors, never by the server.")
Out = Annotated[Path, typer.Option("--out", help="The new file.")]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unavailable(f"cannot read {path}: {error.strerror}", code="file") from None


@policy.command()
def keygen(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(help="Name of the signer.")],
    out: Annotated[Path | None, typer.Option("--out", help="The private key's file (default NAME.key).")] = None,
) -> None:
    """Make a signing key, and its public half beside it, which the site pins: interlock up --signer FILE.pub.json."""
    from policy.bundle import keygen as make  # the parser loads only where it is used

    here = Invocation.of(ctx)
    path = out or Path(f"{name}.key")
    public = make(path, name)
    here.terminal.result({"name": name, "key_id": key_id(public_from_text(public["key"])), "private": str(path),
                          "public": f"{path}.pub.json"})


@policy.command()
def check(ctx: typer.Context, folder: Path) -> None:
    """Check model and policy in a folder; every finding with file and line. Errors refuse, warnings do not."""
    from policy.check import check as look

    here = Invocation.of(ctx)
    files = {path.name: _read(path) for path in sorted(folder.glob("*")) if path.is_file()}
    found = [problem.as_json() for problem in look(files)]
    errors = [p for p in found if p["severity"] == "error"]
    if errors:
        here.terminal.note("\n".join(f"{p['file']}:{p['line']}: [{p['code']}] {p['message']}" for p in found))
        raise Malformed(f"{len(errors)} errors in {folder}", code="policy", next_step="mend these lines",
                        details={"problems": found})
    shown = table("", ["file", "line", "severity", "code", "message"],
                  [(p["file"], p["line"], p["severity"], p["code"], p["message"]) for p in found])
    here.terminal.result({"folder": str(folder), "problems": found}, shown if found else f"{folder}: no problems")


@policy.command()
def pack(
    ctx: typer.Context,
    folder: Path,
    out: Out,
    days: Annotated[int, typer.Option("--days", min=1, max=366, help="How long the bundle is in force.")] = 90,
    version: Annotated[int | None, typer.Option("--version", help="Must rise (default: the time).")] = None,
) -> None:
    """Make an UNSIGNED bundle of a folder. No site accepts it before its authors have signed it."""
    from policy.bundle import describe
    from policy.bundle import pack as make

    here = Invocation.of(ctx)
    archive = make(folder, version=version, life_days=days)
    write_new(out, archive, 0o644)
    here.terminal.result({"file": str(out), "sha256": digest_bytes(archive), **describe(archive)})


@policy.command()
def sign(
    ctx: typer.Context,
    source: Annotated[Path, typer.Argument(help="A policy folder, or a bundle to sign once more.")],
    key: Annotated[list[Path], typer.Option("--key", help="A private signing key; may be given several times.")],
    out: Out,
    days: Annotated[int, typer.Option("--days", min=1, max=366)] = 90,
) -> None:
    """Sign a bundle with each key. Rules about tier critical need two different signers."""
    from policy.bundle import describe, sign_archive
    from policy.bundle import pack as make

    here = Invocation.of(ctx)
    archive = make(source, life_days=days) if source.is_dir() else _read(source)
    for path in key:
        archive = sign_archive(archive, read_ed25519(path))
    write_new(out, archive, 0o644)
    found = describe(archive)
    manifest = found["manifest"]
    here.terminal.result({"file": str(out), "sha256": digest_bytes(archive), **found}, fields({
        "file": str(out), "version": manifest.get("version"), "digest": found["digest"],
        "signed by": cell(found["keys"]), "in force until": when(manifest.get("not_after_us"))}))


@policy.command()
def publish(ctx: typer.Context, bundle: Path) -> None:
    """Publish a signed bundle; the control plane verifies it against its own pinned signers."""
    here = Invocation.of(ctx)
    data = _read(bundle)
    answer = here.api().post("/api/policy/bundles", {"archive": base64.b64encode(data).decode()})
    here.terminal.result({"file": str(bundle), "sha256": digest_bytes(data), **answer})


@policy.command()
def show(ctx: typer.Context) -> None:
    """Show the active bundle."""
    here = Invocation.of(ctx)
    here.terminal.result(here.api().get("/api/policy"))
