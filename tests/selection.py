"""Which tests `make test` leaves to `make test-all`: those that start processes and repeat a kept promise.

A test is `slow` if `MOVED` lists it, or if `KEPT` lists its module and not the test. Names are
those of functions; with a bracket, the beginning of a case's name. CONTRIBUTING.md has a table of what moved,
and of the tests that keep each promise on each change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

LEFT_OUT = ("docker", "slow", "long")
"""The marks of tests that `make test` does not run."""
LEFT_OUT_MODULE = re.compile(rf"^pytestmark = .*\bpytest\.mark\.({'|'.join(LEFT_OUT)})\b", re.MULTILINE)


def cases(function: str, initials: Iterable[str]) -> tuple[str, ...]:
    """The cases of a test whose names begin with one of these."""
    return tuple(f"{function}[{initial}" for initial in initials)


KEPT: dict[str, tuple[str, ...]] = {
    # One program plays in its own namespaces; the others differ in how it ends.
    "tests/agents/test_run.py": (
        "test_mistakes_are_explained",
        "test_without_namespaces_the_command_must_be_trusted",
        "test_program_plays_and_reaches_nothing_but_its_episode_and_its_model",
        "test_folders_in_which_a_suite_or_its_repository_lies_are_not_shown",
    ),
    # Each takes 0.5 s, most of it imports of the command line.
    "tests/cli/test_help.py": (
        "test_help_fits_on_a_screen_and_names_every_command_by_what_people_do",
        "test_every_setting_has_a_section",
        "test_a_wrong_command_line_is_named[srve",
        "test_version_is_printed",
    ),
    "tests/cli/test_runs.py": ("test_runs_are_listed_with_their_success_over_all_finished_episodes",),
    "tests/cli/test_play.py": (
        "test_script_that_solves_its_task_exits_with_zero",
        "test_error_is_one_line",
        "test_invalid_line_is_named",
    ),
    "tests/cli/test_plugin_commands.py": ("test_a_broken_plug_in_is_one_line_that_names_it[module]",),
    "tests/cli/test_view.py": ("test_the_address_of_a_servers_page_has_its_key",),
    "tests/cli/test_export_killed.py": ("test_file_appears_whole_and_replaces_only_if_asked_for",),
    # What a client is refused needs no episode.
    "tests/clients/test_session.py": (
        "test_an_unreachable_server_is_reported_with_its_address",
        "test_a_wrong_path_of_the_server_is_refused_with_the_right_ones",
        "test_leaving_the_context_ends_the_episode_at_once",
        "test_a_claimed_attempt_is_graded_after_its_client_leaves",
    ),
    "tests/clients/test_sync.py": (
        "test_the_stub_matches_the_asynchronous_classes",
        "test_an_episode_is_played_to_its_reward",
        "test_a_client_that_is_not_open_says_so",
    ),
    "tests/clients/test_cancellation.py": (
        "test_a_cancelled_consumer_cancels_its_players",
        "test_openings_that_are_cancelled_twice_leave_no_episode",
    ),
    "tests/clients/test_model_text.py": (
        "test_what_no_server_can_read_is_a_reply_and_other_calls_go_on[http]",
    ),
    "tests/clients/test_lockstep.py": ("test_slots_are_played_one_turn_at_a_time[embedded]",),
    "tests/clients/test_player_failure.py": (
        "test_result_and_log_have_type_message_file_and_line",
        "test_graded_attempt_whose_player_raises_later_keeps_its_verdict",
    ),
    "tests/clients/test_tool_decathlon.py": ("test_it_plays_at_a_url",),
    "tests/clients/test_traces.py": (),
    "tests/clients/test_notes.py": ("test_notes_stand_between_the_calls_and_no_evaluator_reads_them",),
    "tests/clients/test_testing.py": (),
    "tests/e2e/test_episode.py": (
        "test_the_right_answer_is_rewarded_with_one",
        "test_the_agent_finds_no_answers_in_its_sandbox",
        "test_a_cancelled_call_is_cancelled_in_the_tool_and_the_episode_continues",
        "test_a_server_that_dies_fails_its_call_with_its_stderr",
        "test_no_tool_works_after_the_claim",
        "test_cancelling_evaluate_does_not_stop_the_grading",
    ),
    "tests/http/test_health.py": (
        "test_an_episode_changes_the_metrics",
        "test_metrics_need_a_controllers_token_and_a_known_host",
        "test_a_draining_server_is_not_ready",
    ),
    "tests/localtools/test_local_tools.py": (
        "test_tools_are_described_by_the_suites_own_code",
        "test_a_tool_works_in_the_workspace",
        "test_a_task_with_a_tool_without_code_is_not_runnable",
    ),
    "tests/localtools/test_truncation.py": (),
    "tests/packaging/test_release.py": (),
    "tests/sandboxes/test_network.py": (
        "test_names_are_resolved_by_a_name_server_on_this_machines_loopback",
    ),
    "tests/storage/test_lock.py": (),
    # The evaluators of two tasks run on each change.
    "tests/starter/test_wrong_attempts.py": cases(
        "test_only_what_is_a_solution_passes",
        ("explain", "tune"),
    ),
}


MOVED: dict[str, tuple[str, ...]] = {
    "tests/archives/test_packing.py": ("test_memory_hardly_grows_with_the_number_of_names",),
    # A case each of the programs that git could run and the paths that it could follow stays.
    "tests/archives/test_repository_paths.py": cases("test_git_does_not_leave_the_workspace", "aclmrw"),
    "tests/archives/test_repositories.py": cases("test_git_runs_no_program_of_the_repository", "cdgiloqw"),
    "tests/benchmarks/test_weight.py": ("test_every_line_of_the_product_is_counted_in_one_package",),
    # Processes that import the client: the other extra, and what the client loads, stay.
    "tests/clients/test_package.py": (
        "test_what_is_used_without_its_packages_names_the_missing_extra[msgspec",
    ),
    # Its evaluator waits for a proxy that does not answer; what a session is and how the proxy runs stay.
    "tests/web/test_end_to_end.py": ("test_every_sandbox_of_a_task_that_needs_the_web_has_a_session",),
    "tests/clients/test_options.py": ("test_a_server_that_may_open_too_few_files_does_not_start",),
    "tests/tunnels/test_windows.py": ("test_single_bytes_take_no_more_memory_than_the_window",),
    "tests/driver_client/test_lost_streams.py": (
        "test_requests_wait_for_room_and_one_that_is_cancelled_meanwhile_is_not_sent",
    ),
    "tests/driver_client/test_mcp_schema.py": ("test_no_definition_makes_an_sdk_client_refuse_the_list",),
    # Each pair of a preloader and a sandbox takes two seconds; how servers are learnt and served stays.
    "tests/preload/test_attacks.py": (
        "test_a_fork_reaches_nothing_outside",
        "test_a_fork_has_nothing_of_the_servers_memory_and_of_other_sandboxes",
        "test_a_fork_that_is_stopped_half_way_gives_nothing_away",
        "test_a_fork_that_stays_stopped_ends_with_its_sandbox",
        "test_a_descriptor_of_another_kind_lets_no_program_run_outside",
        "test_servers_start_by_themselves_while_a_preloader_is_dead",
    ),
    "tests/preload/test_same_servers.py": (
        "test_servers_whose_start_differs_start_by_themselves",
        "test_a_program_with_the_name_of_a_library_is_no_module",
    ),
    "tests/preload/test_same_state.py": ("test_a_fork_has_the_state_of_a_server_that_starts_by_itself",),
    "tests/fuzz/test_http.py": ("test_generated_requests_are_answered_without_faults",),
    "tests/cli/test_export.py": ("test_hostile_texts_do_not_change_the_elements_of_one_file",),
    # An episode each; one of each module stays.
    "tests/e2e/test_credentials.py": (
        "test_servers_get_their_credentials_and_no_file_has_the_others[host-own",
    ),
    "tests/e2e/test_in_place.py": (
        "test_an_attempt_that_leaves_no_place_for_the_evaluator_is_forfeited",
        "test_an_attempt_without_the_spared_process_fails",
    ),
    "tests/e2e/test_language.py": ("test_prompt_workspace_preprocess_and_evaluation_are_in_chinese",),
    "tests/e2e/test_services.py": (
        "test_processes_that_preprocess_started_keep_running_and_credentials_are_in_place",
    ),
    "tests/docs/test_commands.py": ("test_command_lines_are_valid",),
    "tests/driver/test_protocol.py": ("test_backpressure_bounds_memory_and_loses_no_reply",),
    "tests/tunnels/test_tunnels.py": (
        "test_dial_that_is_cancelled_after_it_connected_gives_its_place_back",
        "test_dial_that_is_cancelled_gives_its_place_back",
    ),
    "tests/fuzz/test_repository_files.py": ("test_no_files_lead_git_out_of_the_workspace",),
    "tests/fuzz/test_lines.py": ("test_no_bytes_confuse_a_reader",),
    # Each runs an evaluator in a process; what a rubric pays is tested without one.
    "tests/grading/test_evaluation.py": (
        "test_agent_cannot_make_an_evaluator_one_that_cannot_run",
        "test_rubric_function_gets_arguments_by_parameter_name",
        "test_rubric_function_that_raises_pays_nothing",
        "test_evaluator_that_python_cannot_run_gives_no_reward",
    ),
    # A supervisor and two servers; recovery is tested in this process by `tests/episodes/test_recovery.py`.
    "tests/http/test_held_episodes.py": (
        "test_an_episode_goes_on_after_a_kill_if_its_starter_comes_back_and_ends_if_not",
    ),
    "tests/page/test_hostile.py": cases("test_the_document_stays_the_same", "bcelt"),
    "tests/page/test_prose.py": ("test_a_text_that_is_made_to_take_long_does_not",),
    # Providers differ in how they isolate: the one that most machines have stays.
    "tests/sandboxes/test_conformance.py": (
        "test_provider_conforms[plain",
        "test_provider_conforms[networked",
        *(
            f"test_provider_conforms[namespaces-{check}"
            for check in ("bytes", "ended", "environment", "many", "paused", "programs", "sandbox_", "sweep")
        ),
    ),
    "tests/sandboxes/test_inside_archives.py": (
        "test_deeper_folders_are_refused",
        "test_folders_as_deep_as_may_be_are_packed_and_unpacked",
    ),
    "tests/sandboxes/test_local.py": (
        "test_sandbox_that_replaced_its_pipes_is_lost",
        "test_output_without_a_server_is_kept_for_the_next_one",
        "test_another_process_with_the_pid_of_a_surviving_one_is_not_reattached",
    ),
    "tests/sandboxes/test_removal.py": (
        "test_a_removal_that_fails_ends_nothing_else_and_is_done_by_the_next_sweep[plain",
        "test_a_removal_that_fails_ends_nothing_else_and_is_done_by_the_next_sweep[namespaces-NamespaceSandbox-_k",
    ),
    "tests/sandboxes/test_isolation.py": (
        "test_user_namespaces_that_are_forbidden_are_a_kernel_that_cannot",
    ),
    "tests/sandboxes/test_strangers.py": ("test_claimed_environment_of_a_stranger_takes_no_memory",),
    "tests/test_json_limits.py": ("test_check_of_four_mebibytes_is_far_faster_than_their_decoding",),
    "tests/telemetry/test_spans.py": ("test_a_server_without_spans_imports_no_sdk_of_opentelemetry",),
    "tests/test_app.py": (
        "test_task_whose_agent_would_share_the_loopback_of_a_server_without_tokens_does_not_run[with tokens",
    ),
}


def is_left_out(path: Path, root: Path) -> bool:
    """Whether `make test` runs none of a module's tests."""
    kept = KEPT.get(path.relative_to(root).as_posix()) if path.is_relative_to(root) else None
    return kept == () or LEFT_OUT_MODULE.search(path.read_text("utf-8")) is not None


def leave_to_test_all(items: list[pytest.Item]) -> None:
    """Mark the tests that are moved as slow."""
    for item in items:
        module, _, test = item.nodeid.partition("::")
        stays = module not in KEPT or _names(KEPT[module], test)
        if not stays or _names(MOVED.get(module, ()), test):
            item.add_marker(pytest.mark.slow)


def _names(names: tuple[str, ...], test: str) -> bool:
    function, _, _ = test.partition("[")
    return any(test.startswith(name) if "[" in name else name == function for name in names)
