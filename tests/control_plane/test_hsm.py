"""The HSM is named once: SoftHSM below the state, or a module by a file."""

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from control_plane import hsm, init
from control_plane.settings import Places, load
from interlock.errors import Conflict, LayerMissing, Malformed

NEEDS_SOFTHSM = pytest.mark.skipif(shutil.which("softhsm2-util") is None, reason="softhsm2 is not installed")


@pytest.fixture
def places(tmp_path: Path) -> Places:
    init.initialise(tmp_path / "s")
    return Places(tmp_path / "s")


@NEEDS_SOFTHSM
def test_softhsm_makes_one_token_with_a_pin_that_nobody_else_reads(places: Places) -> None:
    made = hsm.use_softhsm(places)
    pin = Path(made["pin_file"])
    assert stat.S_IMODE(pin.stat().st_mode) == 0o600
    said = subprocess.run(["softhsm2-util", "--show-slots"], env={"SOFTHSM2_CONF": made["conf"]}, text=True,
                          capture_output=True, check=True).stdout
    assert said.count("User PIN init.:   yes") == 1
    before = pin.read_bytes()
    assert hsm.use_softhsm(places) == made
    assert pin.read_bytes() == before
    assert pin.read_text() not in (places.control / "settings.json").read_text()
    load(places.state)


def _unname(places: Places) -> None:
    """Take the HSM out of the settings, as a settings file from an older backup would."""
    path = places.control / "settings.json"
    value = json.loads(path.read_text())
    del value["kms"]["pkcs11"]
    path.write_text(json.dumps(value))


@NEEDS_SOFTHSM
def test_a_token_that_holds_keys_is_never_made_anew(places: Places) -> None:
    made = hsm.use_softhsm(places)
    pin, folder = Path(made["pin_file"]), places.control / "softhsm"
    (token,) = folder.glob("tokens/*")
    key = token / "0a.object"
    key.write_bytes(b"a key")
    _unname(places)
    assert hsm.use_softhsm(places) == made  # whole: it is named again
    assert key.read_bytes() == b"a key"
    _unname(places)
    before = pin.read_bytes()
    pin.unlink()
    with pytest.raises(Conflict) as found:
        hsm.use_softhsm(places)
    assert found.value.code == "conflict.hsm"
    assert key.exists()
    key.unlink()
    state = places.keys / "run-kek" / "pkcs11.json"
    state.write_text("{}")
    shutil.rmtree(folder)
    with pytest.raises(Conflict):
        hsm.use_softhsm(places)
    state.unlink()
    folder.mkdir()  # control: half made and without keys
    assert hsm.use_softhsm(places) == made
    assert pin.read_bytes() != before


@NEEDS_SOFTHSM
def test_refuses_when_another_hsm_is_named(places: Places, tmp_path: Path) -> None:
    hsm.use_softhsm(places)
    other = tmp_path / "hsm.json"
    other.write_text(json.dumps({"module": "/usr/lib/other.so", "token": "t", "pin_file": "/etc/pin"}))
    with pytest.raises(Conflict) as found:
        hsm.use_module(places, other)
    assert found.value.code == "conflict.hsm"


def test_refuses_when_softhsm_is_not_installed(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hsm, "MODULES", ())
    with pytest.raises(LayerMissing):
        hsm.use_softhsm(places)
    assert not (places.control / "softhsm").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"module": "/x", "token": 1, "pin_file": "/p"}',
                                  '{"module": "/x", "token": "t", "pin_file": "/p", "pin": "1234"}'])
def test_refuses_when_the_file_names_no_hsm(places: Places, tmp_path: Path, text: str) -> None:
    file = tmp_path / "hsm.json"
    file.write_text(text)
    with pytest.raises(Malformed):
        hsm.use_module(places, file)
    file.write_text(json.dumps({"module": "/usr/lib/m.so", "token": "t", "pin_file": "/etc/pin"}))
    assert hsm.use_module(places, file)["token"] == "t"
    assert os.stat(places.control / "settings.json").st_mode & 0o077 == 0
