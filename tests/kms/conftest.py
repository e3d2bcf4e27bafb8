"""SoftHSM tokens: one conf file a process, since a process loads one module once; labels keep tests apart."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from kms import softhsm
from kms.assignment import TokenPlace
from kms.pkcs11 import MODULE, Token


@dataclass
class Tokens:
    """The tokens of this process."""

    folder: Path
    place: TokenPlace


@pytest.fixture(scope="session")
def tokens() -> Iterator[Tokens]:
    folder = Path(tempfile.mkdtemp(prefix="il-hsm-"))
    made = softhsm.make_token(folder, "cp")
    yield Tokens(folder, TokenPlace(Path(made["module"]), "cp", Path(made["pin_file"]), Path(made["conf"])))
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
