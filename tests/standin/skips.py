"""Tests that speak of CPU devices only, by reason. `DEVICE=standin:MODE` leaves them out.

What an accelerator should do and does not yet is no reason: such a test fails.
"""

from __future__ import annotations

#: Parts of test ids by reason.
SKIPS: dict[str, tuple[str, ...]] = {
    "an accelerator draws other numbers than the local CPU": (
        "test_modules.py::test_recurrent_layer_with_dropout_draws_the_same_numbers",
        "test_modules.py::test_attention_and_transformer_layers",
        "test_modules.py::test_attention_variants[{'dropout_p': 0.5}",
        "test_autograd.py::test_checkpoint_recomputes_with_the_same_random_numbers",
        "test_random.py::test_manual_seed_gives_the_bits_of_local_cpu",
        "test_random.py::test_a_generator_is_honoured",
        "test_random.py::test_any_seed_and_length",
        "test_random.py::test_dropout_drops_the_same_elements",
        "test_random.py::test_state_is_that_of_a_local_generator",
        "test_random.py::test_initialisation_of_a_module_on_the_device_is_that_of_a_local_one",
    ),
    "an accelerator does not have the CPU's mode for denormal numbers": (
        "test_settings.py::test_denormals_are_flushed_where_the_program_flushes_them",
        "test_settings.py::test_another_thread_has_its_own_mode",
    ),
    "attention is composed off the CPU, which rounds otherwise in half precision": (
        "test_modules.py::test_models_in_other_precisions",
    ),
    "attention is composed off the CPU: no kernel of it is chosen": (
        "test_attention.py::test_dropout_is_part_of_the_choice",
        "test_settings.py::test_the_kernel_of_attention_follows_the_program",
        "test_attention.py::test_growing_sequences_ask_once",
    ),
    "the stand-in runs the CPU's kernels late: what they refuse becomes a device assert": (
        "test_settings.py::test_an_operation_without_a_deterministic_form_is_refused",
    ),
    "an index out of range is a device assert, which ends an accelerator's context": (
        "test_errors.py::test_an_asynchronous_error_names_operator_and_line",
        "test_errors.py::test_every_kind_of_wait_tells_it",
        "test_errors.py::test_it_is_told_once_and_the_device_goes_on",
        "test_errors.py::test_what_depends_on_a_failed_call_says_so",
        "test_errors.py::test_a_failed_result_can_be_dropped_and_its_memory_used_again",
        "test_errors.py::test_the_first_of_several_errors_is_told_first",
        "test_errors.py::test_an_error_in_backward_surfaces",
        "test_errors.py::test_shoal_blocking_raises_in_the_very_line",
        "test_errors.py::test_every_wait_for_an_event_behind_a_failure_tells_it",
        "test_errors.py::test_an_event_behind_the_use_of_a_poisoned_value_tells_it",
        "test_errors.py::test_an_event_tells_nothing_that_was_told_before_it",
    ),
}


def reason_for(test: str) -> str:
    """Return why a test is left out; "" if it is not."""
    for reason, parts in SKIPS.items():
        if any(part in test for part in parts):
            return reason
    return ""
