"""What a person may hand over in place of a bundle: refused by the very reading that publishing uses."""

import io
import tarfile
from pathlib import Path

import pytest

from interlock.errors import Malformed, Untrusted
from policy import bundle

POLICY = Path(__file__).resolve().parents[2] / "examples" / "policy"


def _tar(**files: bytes) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.mark.parametrize("data", [b"", b"x", b"PK\x03\x04" + b"\0" * 600, _tar(**{bundle.SIGNED: b"{"})])
def test_refuses_when_what_is_published_is_no_bundle(data: bytes) -> None:
    with pytest.raises(Malformed) as refused:
        bundle.read(data, {}, None)
    assert refused.value.code.startswith("malformed")
    with pytest.raises(Untrusted) as unsigned:  # the positive control: a real archive gets past its form
        bundle.read(bundle.pack(POLICY), {}, None)
    assert unsigned.value.code == "untrusted.unsigned"
    assert unsigned.value.next_step
