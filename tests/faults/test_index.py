"""Each fault that the product promises to meet with one clear message, and the tests that prove it.

"One clear message" is a typed refusal with a code and a next step, and nothing half-done.
"""

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
INDEX = {
    "unsigned bundle": [
        "control_plane/test_runs.py::test_bundles_are_refused_unsigned_and_the_old_one_decides",
        "policy/test_bundle.py::test_refuses_when_signature_is_missing",
    ],
    "malformed bundle": [
        "policy/test_bundle.py::test_refuses_when_archive_is_not_canonical",
        "policy/test_bundle.py::test_refuses_when_rules_do_not_parse",
        "faults/test_bundle_files.py::test_refuses_when_what_is_published_is_no_bundle",
    ],
    "unknown tier": [
        "control_plane/test_runs.py::test_refuses_an_unknown_tier_and_unknown_fields",
        "cli/test_run.py::test_an_unknown_tier_is_the_servers_to_refuse",
    ],
    "full disk at the spool": [
        "audit/test_spool.py::test_refuses_when_the_disk_is_full_and_goes_on_after",
        "chaos/test_node_faults.py::test_a_full_disk_at_the_node_refuses_in_words_and_heals",
    ],
    "unreadable key file": [
        "faults/test_key_files.py::test_refuses_when_a_key_file_is_open_gone_or_spoilt",
        "faults/test_key_files.py::test_refuses_when_the_listeners_pair_is_open_spoilt_or_no_pair",
        "cli/test_words.py::test_refuses_when_others_can_read_the_credentials",
    ],
    "port in use": [
        "control_plane/test_programs.py::test_refuses_when_a_port_is_in_use",
        "cli/test_up.py::test_refuses_when_the_port_is_in_use",
    ],
    "no bubblewrap": [
        "sandbox/test_start.py::test_refuses_when_bubblewrap_is_missing",
        "cli/test_up.py::test_doctor_says_what_is_missing",
    ],
    "user namespaces forbidden": [
        "sandbox/test_start.py::test_refuses_when_user_namespaces_are_forbidden",
        "sandbox/test_start.py::test_refuses_when_the_kernel_forbids_user_namespaces_in_fact",
    ],
    "no root": [
        "cli/test_without_root.py::test_refuses_when_not_root_to_start_a_node_and_the_rest_works",
        "runners/test_join.py::test_refuses_when_not_root",
        "runners/test_serve.py::test_refuses_when_not_root",
        "faults/test_without_root.py::test_refuses_when_a_program_of_the_node_is_started_without_root",
    ],
    "half-made state": [
        "control_plane/test_programs.py::test_refuses_a_half_made_state",
        "cli/test_up.py::test_refuses_when_the_state_is_half_made",
        "runners/test_join.py::test_refuses_when_the_state_is_half_made",
    ],
    "second start": [
        "control_plane/test_programs.py::test_serves_both_listeners_and_refuses_a_second_start",
        "killswitch/test_store.py::test_refuses_when_a_second_supervisor_starts",
        "runners/test_serve.py::test_refuses_a_second_start_and_ends_cleanly",
        "demo/test_demo_lock.py::test_refuses_when_another_demo_walks_in_the_same_folder",
    ],
    "wrong join secret": [
        "runners/test_join.py::test_refuses_when_the_secret_is_wrong_and_leaves_nothing",
        "control_plane/test_node_link.py::test_refuses_when_the_secret_is_wrong_used_or_expired",
    ],
    "expired certificate": [
        "runners/test_upstream.py::test_refuses_when_the_certificate_has_expired",
        "control_plane/test_node_link.py::test_refuses_a_certificate_that_expired_since_the_handshake",
        "faults/test_key_files.py::test_the_listeners_certificate_is_issued_anew",
    ],
    "clock moved": [
        "control_plane/auth/test_login.py::test_I21_no_jump_of_the_clock_opens_a_replay",
        "killswitch/test_page.py::test_a_wall_clock_jump_changes_nothing",
        "killswitch/test_watch.py::test_the_wall_clock_is_never_read",
        "audit/test_spool.py::test_refuses_when_the_clock_runs_backwards_is_no_reason",
    ],
}


def names_of(path: Path) -> set[str]:
    """Return the names of the tests that a file defines."""
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("fault", INDEX)
def test_each_fault_has_its_tests(fault: str) -> None:
    assert INDEX[fault]
    for entry in INDEX[fault]:
        file, _, name = entry.partition("::")
        assert name in names_of(TESTS / file), entry


def test_a_test_that_is_gone_is_noticed() -> None:
    assert "test_a_test_that_is_gone_is_noticed" in names_of(Path(__file__))
    assert "test_that_never_was" not in names_of(Path(__file__))
    assert names_of(TESTS / "no-such-file.py") == set()
