"""SoftHSM tokens: one conf file a process, since a process loads one module once; labels keep tests apart."""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kms.assignment import TokenPlace
from kms.pkcs11 import MODULE, Token

SOFTHSM = Path("/usr/lib/softhsm/libsofthsm2.so")


@dataclass
class Tokens:
    """The tokens of this process."""

    folder: Path
    place: TokenPlace


@pytest.fixture(scope="session")
def tokens() -> Iterator[Tokens]:
    folder = Path(tempfile.mkdtemp(prefix="il-hsm-"))
    (folder / "tokens").mkdir()
    conf, pin = folder / "softhsm2.conf", folder / "pin"
    conf.write_text(f"directories.tokendir = {folder / 'tokens'}\nobjectstore.backend = file\nlog.level = ERROR\n")
    pin.touch(0o600)
    pin.write_text(secrets.token_hex(8))
    subprocess.run(["softhsm2-util", "--init-token", "--free", "--label", "cp", "--so-pin", "12345678", "--pin",
                    pin.read_text()], env={**os.environ, "SOFTHSM2_CONF": str(conf)}, check=True, capture_output=True)
    yield Tokens(folder, TokenPlace(SOFTHSM, "cp", pin, conf))
    if MODULE._library is not None:
        MODULE._library.finalize()
    os.environ.pop("SOFTHSM2_CONF", None)
    shutil.rmtree(folder)


@pytest.fixture
def token(tokens: Tokens) -> Iterator[Token]:
    """A token without keys."""
    fresh = Token(tokens.place)
    empty(fresh)
    yield fresh
    fresh.close()


def empty(token: Token) -> None:
    """Destroy every key of the token; only tests do that."""
    from pkcs11 import Attribute, ObjectClass

    def work() -> None:
        for key in list(token._session.get_objects({Attribute.CLASS: ObjectClass.SECRET_KEY})):
            key.destroy()

    token._ask(work)
