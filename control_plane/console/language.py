"""Languages of the console: English is the source, Simplified Chinese a gettext catalogue.

Codes, event names and ids are never translated, only labels. A message without a translation is shown in
English and is an error in the tests.
"""

from functools import cache
from pathlib import Path

from babel.core import negotiate_locale
from babel.messages.pofile import read_po

FOLDER = Path(__file__).parent / "i18n"
LANGUAGES = {"en": "en", "zh": "zh-Hans"}  # our short name → the value of <html lang>


@cache
def catalogue(language: str) -> dict[str, str]:
    """Return message → translation of a language; English has none."""
    path = FOLDER / f"{language}.po"
    if not path.exists():
        return {}
    with path.open("rb") as source:
        return {str(m.id): str(m.string) for m in read_po(source) if m.id and m.string}


def choose(asked: str | None, cookie: str | None, accept: str) -> str:
    """Return the short name of the language: what was just asked for, else the cookie, else the browser's."""
    for wish in (asked, cookie):
        if wish in LANGUAGES:
            return wish
    wanted = [part.split(";")[0].strip().replace("-", "_") for part in accept.split(",") if part.strip()]
    found = negotiate_locale([w.split("_")[0] for w in wanted], list(LANGUAGES))
    return found if found in LANGUAGES else "en"


def translate(language: str, message: str) -> str:
    """Return the message in `language`."""
    return catalogue(language).get(message, message)
