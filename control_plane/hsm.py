"""Which HSM keeps the keys of the upper tiers: written into the settings once, by local commands of the state's owner.

`use_softhsm` makes a token of SoftHSM below the state: a real PKCS#11 module without hardware, for one machine and
for tests. A real HSM is named by a file (`use_module`). PINs lie in files that only the control plane's user can
read, and are typed into the tool's terminal, never put on a command line.
"""

import json
import os
import secrets
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from control_plane.keys import FOLDER
from control_plane.settings import Places, load
from interlock.durable import write_over
from interlock.errors import Conflict, LayerMissing, Malformed, Refusal, Unavailable
from interlock.keyfile import write_private

LABEL = "interlock"
MODULES = ("/usr/lib/softhsm/libsofthsm2.so", "/usr/lib/x86_64-linux-gnu/softhsm/libsofthsm2.so",
           "/usr/lib/aarch64-linux-gnu/softhsm/libsofthsm2.so")
PROMPT_S = 15.0
_FIELDS = {"module", "token", "pin_file", "conf"}


def use_softhsm(places: Places) -> dict[str, Any]:
    """Make a SoftHSM token once and name it in the settings; returns the `pkcs11` object. Idempotent.

    A token that is there already is named again, never made anew. Raises LayerMissing (SoftHSM is not installed),
    Unavailable (the token could not be made) or Conflict (another HSM is named, or keys of one are about).
    """
    folder, pin = places.control / "softhsm", places.keys / "pkcs11.pin"
    module = next((m for m in MODULES if Path(m).is_file()), "")
    tool = shutil.which("softhsm2-util", path="/usr/bin:/bin:/usr/local/bin")
    if not module or tool is None:
        raise LayerMissing("SoftHSM is not installed", code="softhsm", next_step="apt-get install softhsm2")
    wanted = {"module": module, "token": LABEL, "pin_file": str(pin), "conf": str(folder / "softhsm2.conf")}
    if not _named(places, wanted):
        if not (pin.exists() and folder.is_dir()):  # the PIN is written last: with it the token is whole
            _refuse_keys(places, folder)
            _make(folder, pin, tool)
        _name(places, wanted)
    return wanted


def _refuse_keys(places: Places, folder: Path) -> None:
    """Refuse to throw a token away that holds keys, or to make one while another held them: settings that came back
    from an older backup name no HSM. Raises Conflict (``conflict.hsm``)."""
    held = any(o.name != "token.object" for o in folder.glob("tokens/*/*.object"))
    if held or (places.keys / FOLDER / "pkcs11.json").exists():
        raise Conflict("keys were made in an HSM that the settings do not name any more", code="hsm",
                       next_step=f"restore {folder}, {places.keys} and kms in settings.json from one backup")


def use_module(places: Places, file: Path) -> dict[str, Any]:
    """Name a PKCS#11 module by a JSON file `{module, token, pin_file, conf?}`; returns it.

    Raises Malformed, or Conflict (another HSM is named already).
    """
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        value = None
    if not isinstance(value, dict) or not {"module", "token", "pin_file"} <= set(value) <= _FIELDS or not all(
        isinstance(v, str) for v in value.values()
    ):
        raise Malformed(f"{file} does not name module, token and pin_file", code="hsm")
    if not _named(places, value):
        _name(places, value)
    return value


def _named(places: Places, wanted: dict[str, Any]) -> bool:
    """Return whether the settings name exactly this one; raises Conflict when they name another."""
    found = _settings(places).get("kms", {}).get("pkcs11")
    if found is not None and found != wanted:
        raise Conflict("the settings name another HSM", code="hsm",
                       next_step=f"keys under it would be lost; see {places.control / 'settings.json'}")
    return found is not None


def _settings(places: Places) -> dict[str, Any]:
    found = json.loads((places.control / "settings.json").read_bytes())
    assert isinstance(found, dict)
    return found


def _name(places: Places, wanted: dict[str, Any]) -> None:
    value, path = _settings(places), places.control / "settings.json"
    kms = {**value.get("kms", {}), "pkcs11": wanted}
    before = path.read_bytes()
    write_over(path, json.dumps({**value, "kms": kms}, indent=1).encode() + b"\n", 0o600)
    try:
        load(places.state)  # what was written is what the next start will read
    except Refusal:
        write_over(path, before, 0o600)
        raise


def _make(folder: Path, pin: Path, tool: str) -> None:
    """Make the token in a fresh folder; a half-made one, without keys, is thrown away first."""
    shutil.rmtree(folder, ignore_errors=True)
    pin.unlink(missing_ok=True)
    (folder / "tokens").mkdir(mode=0o700, parents=True)
    folder.chmod(0o700)
    conf = folder / "softhsm2.conf"
    text = f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\nlog.level = ERROR\n"
    write_private(conf, text.encode())
    user, officer = secrets.token_hex(16), secrets.token_hex(16)
    _typed([tool, "--init-token", "--free", "--label", LABEL], conf, [officer, officer, user, user])
    write_private(pin, user.encode())


def _typed(argv: list[str], conf: Path, answers: list[str]) -> None:
    """Run a tool on a terminal of its own and type one answer at each prompt; raises Unavailable."""
    ours, theirs = os.openpty()
    try:
        process = subprocess.Popen(argv, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True, cwd="/",
                                   env={"SOFTHSM2_CONF": str(conf), "PATH": "/usr/bin:/bin"})
        os.close(theirs)
        for answer in answers:
            if not _prompted(ours):
                break
            os.write(ours, answer.encode() + b"\n")
        _drain(ours)
        status = _status(process)
    finally:
        os.close(ours)
    if status != 0:
        raise Unavailable("softhsm2-util could not make a token", code="softhsm",
                          next_step="run softhsm2-util --show-slots as the control plane's user")


def _prompted(terminal: int) -> bool:
    """Wait for a colon at the end of what was said; return False when the tool ended or stayed silent."""
    said, until = b"", time.monotonic() + PROMPT_S
    while not said.rstrip().endswith(b":"):
        left = until - time.monotonic()
        if left <= 0 or not select.select([terminal], [], [], left)[0]:
            return False
        try:
            said += os.read(terminal, 4096)
        except OSError:
            return False
    return True


def _drain(terminal: int) -> None:
    while select.select([terminal], [], [], PROMPT_S)[0]:
        try:
            if not os.read(terminal, 4096):
                return
        except OSError:
            return


def _status(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(PROMPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return -1
