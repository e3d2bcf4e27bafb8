"""Up, down, up again on both databases; the migrated schema is the one that the code believes in."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Engine, inspect, text

from control_plane.store import versions as run
from control_plane.store.db import open_engine, reading, writing
from control_plane.store.tables import metadata
from interlock.errors import Conflict


def _differences(engine: Engine) -> list[object]:
    with reading(engine) as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "target_metadata": metadata})
        return list(compare_metadata(context, metadata))


def test_metadata_equals_migrated_schema(engine: Engine) -> None:
    assert run.current(engine) is None
    run.upgrade(engine)
    assert run.current(engine) == run.latest()
    assert _differences(engine) == []
    found = inspect(engine)
    for table in metadata.sorted_tables:
        assert {tuple(u["column_names"]) for u in found.get_unique_constraints(table.name)} == {
            tuple(c.name for c in k.columns) for k in table.constraints if type(k).__name__ == "UniqueConstraint"
        }, table.name
        assert found.get_pk_constraint(table.name)["constrained_columns"] == [c.name for c in table.primary_key]


def test_comparison_sees_a_difference(engine: Engine) -> None:
    """Positive control of the test above: one column less is noticed."""
    run.upgrade(engine)
    with writing(engine) as connection:
        connection.execute(text("ALTER TABLE throttles DROP COLUMN locked_us"))
    assert len(_differences(engine)) == 1


def test_down_leaves_nothing_and_up_again_works(engine: Engine) -> None:
    run.upgrade(engine)
    run.downgrade(engine)
    assert set(inspect(engine).get_table_names()) <= {"alembic_version"}
    assert run.current(engine) is None
    run.upgrade(engine)
    assert _differences(engine) == []


def test_upgrade_is_idempotent_and_keeps_rows(engine: Engine) -> None:
    run.upgrade(engine)
    with writing(engine) as connection:
        connection.execute(text("INSERT INTO site (key, value) VALUES ('a', 'b')"))
    run.upgrade(engine)
    with reading(engine) as connection:
        assert connection.execute(text("SELECT value FROM site")).scalar_one() == "b"


def test_refuses_when_a_newer_program_made_the_database(engine: Engine) -> None:
    run.upgrade(engine)
    with writing(engine) as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '99_99'"))
    with pytest.raises(Conflict) as caught:
        run.upgrade(engine)
    assert caught.value.code == "conflict.schema"
    assert caught.value.next_step


def test_refuses_half_an_upgrade(engine: Engine) -> None:
    """A table in the way fails the step; nothing of the step stays."""
    with writing(engine) as connection:
        connection.execute(text("CREATE TABLE runs (id INTEGER)"))
    with pytest.raises(Exception, match="runs"):
        run.upgrade(engine)
    assert set(inspect(engine).get_table_names()) <= {"runs"}


def test_a_stranger_in_the_current_directory_is_not_imported(tmp_path: Path) -> None:
    for name in ("policy", "audit", "control_plane", "migrations", "alembic", "env"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('stranger imported')\n")
    open_engine(f"sqlite:///{tmp_path / 'c.db'}").dispose()
    code = (
        "import sys; from control_plane.store.db import open_engine; from control_plane.store import versions as run;"
        f"e = open_engine('sqlite:///{tmp_path / 'c.db'}'); run.upgrade(e); print(run.current(e));"
        "assert '' not in sys.path and '.' not in sys.path"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={"PATH": os.environ["PATH"]},
    )
    assert done.stdout.strip() == run.latest(), done.stderr


# Rows of each later step's tables, the referred ones first; the first two are of the step before.
_PERSON = ("INSERT INTO people (id, name, tenant, kind, owner, password_hash, totp_last, totp_active, person_key,"
           " disabled, created_us) VALUES ('per_1', 'rob', 'lab', 'person', '', 'x', 0, TRUE, '', FALSE, 1)")
_RUN = ("INSERT INTO runs (id, tenant, subject, owner, tier, model, plan, plan_digest, approval, state, attempt, node,"
        " created_us, ended_us, outcome) VALUES ('run_1', 'lab', 'per_1', 'per_1', 'none', '', '{}', 'd', '', 'ended',"
        " 1, 'n1', 1, 1, '')")
_LATER = (
    "INSERT INTO run_keys VALUES ('run_1', 'local', 'kek', 1, 'x', '{}', 1)",
    "INSERT INTO checkpoints VALUES ('sha256:1', 'run_1', 1, 1, 'weights', 1, 1, '', 'n1', 'x', 1)",
    "INSERT INTO models VALUES ('aurora', 'lab', 'per_1', 'none', 1)",
    "INSERT INTO versions VALUES ('sha256:1', 'aurora', 1, 'none', 'serving', 'run_1', 1, '{}', '', 'per_1', 1, 1)",
    "INSERT INTO programme_members VALUES ('trusted-testers', 'per_1', 'Partner GmbH', 2, 'per_1', 1, 0)",
    "INSERT INTO engines VALUES ('run_1', 1, 'sha256:1', 1)",
)


def test_each_step_goes_up_and_down_over_rows(engine: Engine) -> None:
    """A database that an older program filled comes up; what it knew is still there after the way back."""
    run.upgrade(engine, "01_01")
    with writing(engine) as connection:
        connection.execute(text(_PERSON))
        connection.execute(text(_RUN))
    run.upgrade(engine)
    with writing(engine) as connection:
        for row in _LATER:
            connection.execute(text(row))
    for version in ("02_01", "01_01"):
        run.downgrade(engine, version)
        assert run.current(engine) == version
        with reading(engine) as connection:
            assert connection.execute(text("SELECT id FROM runs")).scalars().all() == ["run_1"]
    run.upgrade(engine)
    assert _differences(engine) == []
    with reading(engine) as connection:
        assert connection.execute(text("SELECT count(*) FROM versions")).scalar_one() == 0
