"""What alembic runs for one upgrade or downgrade; `control_plane/store/versions.py` hands the connection in."""

from alembic import context

from control_plane.store.tables import metadata

context.configure(
    connection=context.config.attributes["connection"], target_metadata=metadata, render_as_batch=True,
    compare_type=True,
)
with context.begin_transaction():
    context.run_migrations()
