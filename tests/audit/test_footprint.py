"""What a node or an auditor loads of this room brings no database."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["spool", "shipping", "marks", "verify", "merkle", "treehead", "intake", "leaf"])
def test_loads_no_database(module: str) -> None:
    code = f"import sys, audit.{module}; sys.exit(any(m.startswith(('sqlalchemy', 'psycopg')) for m in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_ledger_does_load_it() -> None:
    code = "import sys, audit.ledger; sys.exit('sqlalchemy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1
