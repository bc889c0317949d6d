"""Which test proves what is promised for bad input and faults of the scheduler and of what lies around it. This one
holds that they exist; each is run where it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent

FAULTS: dict[str, tuple[str, ...]] = {
    "a backend that hangs": (
        "service/backends/test_openai.py::test_silence_is_given_up_in_every_phase",
        "service/test_routing.py::test_a_hang_costs_half_the_time_to_the_deadline_and_not_the_answer",
        "e2e/test_backends.py::test_a_backend_that_hangs_is_left_and_taken_up_again",
    ),
    "a backend that closes half-way, answers garbage, or says 429": (
        "service/backends/test_openai.py::test_each_fault_has_its_kind",
        "service/backends/test_openai.py::test_a_connection_that_died_in_the_pool_costs_no_request",
        "service/backends/test_forms.py::test_calls_that_are_none_are_the_backends_fault",
        "service/test_routing.py::test_full_small_and_cooling_ones_are_not_asked",
        "clients/test_matrix.py::test_a_429_is_waited_out",
    ),
    "a backend that lies about its context": (
        "service/test_routed.py::test_a_backend_that_lies_about_its_window_is_planned_for_anew",
        "service/test_routing.py::test_a_window_that_was_a_lie_is_learnt",
    ),
    "clocks that jump": (
        "service/test_ledger.py::test_the_wall_clock_jumps",
        "service/test_ledger.py::test_a_monotonic_clock_that_goes_back_takes_nothing",
        "service/test_routing.py::test_a_clock_that_jumps_back_keeps_nobody_out_for_long",
    ),
    "a full disk": (
        "memory/test_store.py::test_a_full_disk_is_named_and_nothing_is_lost",
        "memory/test_library.py::test_full_disk_is_a_clear_refusal",
        "api/test_files.py::test_full_disk_is_explained",
        "runtime/test_kv_disk.py::test_a_full_disk_skips_the_save",
        "runtime/test_kv_disk.py::test_a_manifest_that_is_locked_or_on_a_full_disk_loses_nothing",
        "runtime/test_tiers_runtime.py::test_a_full_disk_is_said_at_start",
        "service/test_ledger.py::test_a_full_disk_loses_no_usage_and_refuses_nobody",
        "service/batch/test_queue.py::test_a_step_that_fails_is_tried_again_and_one_without_a_batch_ends",
    ),
    "a locked database": (
        "memory/test_store.py::test_another_program_that_holds_the_database_is_named",
        "memory/test_store_contract.py::test_a_new_file_that_others_have_open_is_waited_for",
    ),
    "a full queue": (
        "engine/test_loop.py::test_a_full_queue_refuses_its_own_class_only",
        "service/test_ledger.py::test_a_full_queue_is_the_third_meaning",
        "api/test_responses_background.py::test_it_waits_while_the_queue_is_full",
    ),
    "deadlines of 0, negative, an hour": (
        "api/test_schema.py::test_wrong_values_name_their_field",
        "api/test_schema.py::test_a_deadline_of_an_hour_is_one",
    ),
    "a tenant with no quota": (
        "service/test_ledger.py::test_without_a_quota_nothing_is_refused_and_all_is_counted",
        "service/caches/test_answers.py::test_a_tenant_has_its_quota_and_the_oldest_go_first",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_has_its_tests(fault: str) -> None:
    for name in FAULTS[fault]:
        path, _, function = name.partition("::")
        assert re.search(rf"^(async )?def {function}\(", (TESTS / path).read_text("utf-8"), re.MULTILINE), name
