"""What must lie nowhere in clear: searched for byte by byte in all files of a site, and in the process list.

Needles are what an attacker would want: run keys and file keys (unwrapped here with the site's own providers, as raw
bytes, hex and base64), API keys, and windows of weights that are known in clear.
"""

import base64
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pkcs11  # noqa: F401 - loaded while we may still read where it lies
from sqlalchemy import create_engine, text

from control_plane.keys import FOLDER, RunKeys
from control_plane.settings import load
from control_plane.store import run_keys
from interlock.manifest import read
from interlock.sealed import unwrap_file_key

WINDOW = 48


def spelled(name: str, secret: bytes) -> dict[str, bytes]:
    """Return the forms in which a secret could lie about."""
    plain, url = base64.b64encode(secret), base64.urlsafe_b64encode(secret)
    return {f"{name} (raw)": secret, f"{name} (hex)": secret.hex().encode(), f"{name} (base64)": plain.rstrip(b"="),
            f"{name} (urlsafe)": url.rstrip(b"=")}


def keys_of(state: Path) -> dict[str, bytes]:
    """Return every run key and file key of a site, by name; the control plane need not run.

    Its own files open to their owner alone, so this process becomes him for that long.
    """
    owner = (state / "control").stat().st_uid
    os.seteuid(owner)
    try:
        return _keys(state)
    finally:
        os.seteuid(0)


def _keys(state: Path) -> dict[str, bytes]:
    settings = load(state)
    providers = RunKeys(settings.kms, settings.places.keys / FOLDER)
    engine = create_engine(f"sqlite:///file:{state}/control/control.db?mode=ro&uri=true")
    found: dict[str, bytes] = {}
    try:
        with engine.connect() as connection:
            runs = [str(r.run) for r in connection.execute(text("SELECT run FROM run_keys"))]
            kept = {run: run_keys.one(connection, run) for run in runs}
            rows = list(connection.execute(text("SELECT run, step, manifest FROM checkpoints")))
    finally:
        engine.dispose()
    for run, one in kept.items():
        assert one is not None
        found[f"run key of {run}"] = providers.named(one.wrapped.provider).unwrap(one.wrapped, one.context)
    for row in rows:
        for file in read(bytes(row.manifest)).files:
            key = unwrap_file_key(found[f"run key of {row.run}"], file.wrapped, row.run, row.step, file.name)
            found[f"file key of {row.run} step {row.step} {file.name}"] = key
    return found


def windows(weights: Path, count: int = 12) -> dict[str, bytes]:
    """Return pieces of a safetensors file's data, from places that a fixed seed chooses."""
    data = weights.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    draw = random.Random(7)
    found: dict[str, bytes] = {}
    while len(found) < count:
        at = draw.randrange(start, len(data) - WINDOW)
        piece = data[at:at + WINDOW]
        if len(set(piece)) > 20:  # zeros and the like are everywhere
            found[f"weights at {at}"] = piece
    return found


def files_below(*folders: Path) -> Iterator[Path]:
    for folder in folders:
        for place, _, names in os.walk(folder):
            for name in names:
                path = Path(place) / name
                if path.is_file() and not path.is_symlink():
                    yield path


def leaks(needles: dict[str, bytes], paths: Iterable[Path]) -> list[str]:
    """Return `needle: path` for each needle that lies in a file."""
    found = []
    for path in paths:
        try:
            data = path.read_bytes()
        except OSError:
            continue  # gone meanwhile
        found += [f"{name}: {path}" for name, needle in needles.items() if needle in data]
    return found


def told_by_processes(needles: dict[str, bytes]) -> list[str]:
    """Return `needle: pid` for each that stands in an argument list or an environment of this host."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            for name in ("cmdline", "environ"):
                try:
                    data = (folder / name).read_bytes()
                except OSError:
                    continue
                found += [f"{n}: {folder.name} {name}" for n, needle in needles.items() if needle in data]
    return found


def needles_of(state: Path, weights: Path, *texts: str) -> dict[str, bytes]:
    """Return all needles of a site."""
    found = windows(weights)
    for name, key in keys_of(state).items():
        found.update(spelled(name, key))
    return found | {f"text {i}": t.encode() for i, t in enumerate(texts)}
