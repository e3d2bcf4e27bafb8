"""Make a SoftHSM token: a PKCS#11 token in files, for a site without an HSM, for the demo and for tests.

It keeps keys from being read out through the interface, not from whoever reads its files. A real token takes the
same settings with another module.
"""

import os
import secrets
import subprocess
from pathlib import Path

from interlock.errors import Unavailable
from interlock.keyfile import write_private

MODULE = Path("/usr/lib/softhsm/libsofthsm2.so")
LIMIT_S = 20
_CONF = "directories.tokendir = {tokens}\nobjectstore.backend = file\nlog.level = ERROR\nslots.removable = false\n"


def make_token(folder: Path, label: str, module: Path = MODULE) -> dict[str, str]:
    """Make `folder` (0700) with a token `label`, its conf file and two random PINs (0600); return the settings'
    object ``kms.pkcs11``.

    Everything belongs to whoever calls. Raises Unavailable (SoftHSM is not installed, or refuses) or Conflict
    (there is a token already).
    """
    if not module.exists():
        raise Unavailable("SoftHSM is not installed", code="provider", next_step="apt-get install softhsm2")
    conf, tokens, pin_file = folder / "softhsm2.conf", folder / "tokens", folder / "pin"
    for made in (folder, tokens):
        made.mkdir(mode=0o700, exist_ok=True)
    officer, user = secrets.token_hex(16), secrets.token_hex(16)
    write_private(pin_file, user.encode())
    write_private(folder / "officer-pin", officer.encode())
    write_private(conf, _CONF.format(tokens=tokens).encode())
    _initialise(conf, label, f"{officer}\n{officer}\n{user}\n{user}\n".encode())
    return {"module": str(module), "token": label, "pin_file": str(pin_file), "conf": str(conf)}


def _initialise(conf: Path, label: str, answers: bytes) -> None:
    """Run SoftHSM's own command. It asks for the PINs at a terminal, so that no process list ever shows them."""
    ours, theirs = os.openpty()
    try:
        os.write(ours, answers)
        done = subprocess.run(
            ["softhsm2-util", "--init-token", "--free", "--label", label], stdin=theirs, capture_output=True,
            timeout=LIMIT_S, check=False, env={"SOFTHSM2_CONF": str(conf), "PATH": os.environ.get("PATH", os.defpath)})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable("SoftHSM's command does not answer", code="provider",
                          next_step="apt-get install softhsm2", details={"reason": type(error).__name__}) from None
    finally:
        os.close(ours)
        os.close(theirs)
    if done.returncode:
        raise Unavailable("SoftHSM made no token", code="provider", next_step=f"look into {conf.parent}",
                          details={"status": done.returncode})
