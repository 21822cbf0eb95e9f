"""Which tests are the smoke tests: `make smoke`."""

from __future__ import annotations

import pytest

SMOKE = (
    "tests/wire/",
    "tests/test_face.py",
    "tests/install/test_installer.py",
    "tests/install/test_plan.py",
    "tests/transports/test_shm.py",
    "tests/worker/test_coordinator.py",
    "tests/worker/test_groups.py",
    "tests/worker/test_machine.py",
    "tests/worker/test_server.py",
    "tests/manager/test_manager.py",
    "tests/manager/test_catching_up.py",
    "tests/engines/test_vllm_tokens.py::test_updates_through_every_policy_and_transport_and_back_again[tp2]",
    "tests/engines/test_vllm_faults.py::test_an_installation_that_fails_on_one_rank_is_undone_on_all",
    "tests/engines/test_sglang_tokens.py::test_twenty_times_there_and_back",
)
"""Files, directories and single tests, as pytest names them."""


@pytest.hookimpl(tryfirst=True)  # before `-m` leaves out what is not marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(SMOKE):
            item.add_marker(pytest.mark.smoke)
