"""Fixtures of the sandbox's tests serve here too."""

from tests.sandbox.conftest import host, make_profile, pool, pytest_collection_modifyitems, runtime, tree

__all__ = ["host", "make_profile", "pool", "pytest_collection_modifyitems", "runtime", "tree"]
