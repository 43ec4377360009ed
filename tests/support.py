"""docs/support.md, made of the registry of layers and of the tests: `python -m tests.support`.

Each row says what is supported, how, and which test shows it. `tests/test_support.py` holds the
page to this file, this file to the registry, and every named test to its existence.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torch import nn

from fop.layers import ADAPTERS as REGISTERED
from fop.layers import NormAdapter

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"


class Row(NamedTuple):
    what: str
    how: str
    tests: str  # "file::function", several separated by spaces; the file without test_ and .py


EXACT = "exactness::test_every_layer_takes_the_reference_step"
ADAPTERS = {
    "LinearAdapter": Row("", "Kronecker factors; any number of shared dimensions", EXACT),
    "ConvAdapter": Row(
        "",
        "Kronecker factors, exact for each group; any stride, dilation, padding and padding mode",
        f"{EXACT} layers::test_adapters_pass_the_battery",
    ),
    "ConvTransposeAdapter": Row(
        "",
        "Kronecker factors, exact for each group, of the mirrored convolution",
        f"{EXACT} layers::test_adapters_pass_the_battery",
    ),
    "EmbeddingAdapter": Row(
        "",
        "Kronecker factors, the input factor diagonal (how often each index occurs); "
        "`max_norm`, `scale_grad_by_freq` and `sparse`: fallback",
        "exactness::test_embeddings_take_the_reference_step "
        "wide_layers::test_embeddings_with_other_gradients_fall_back",
    ),
}
UNITWISE = Row(
    "",
    'fallback; with `norms="unitwise"` the exact 2 x 2 curvature of every unit',
    "exactness::test_unitwise_norms_take_the_reference_step "
    "norms::test_a_norm_layer_takes_the_step_of_its_exact_blocks",
)

OTHER_LAYERS = [
    Row(
        "A layer type of your own",
        "`fop.register_layer`, with an adapter; `fop.testing.check_layer` tests it",
        "register_layer::test_a_minimal_adapter_passes_the_battery "
        "register_layer::test_it_trains_like_linear_layers "
        "register_layer::test_the_battery_names_a_mistake",
    ),
    Row(
        "`nn.LSTM`, `nn.GRU`, `nn.EmbeddingBag`, any other module",
        "fallback, named in the log",
        "loops::test_other_layers_are_trained_by_the_fallback_and_named",
    ),
    Row(
        "`nn.MultiheadAttention`",
        "Kronecker factors of queries, keys, values and output, packed or apart, `batch_first` "
        "or not",
        "attention::test_steps_are_those_of_four_linear_layers "
        "attention::test_outputs_and_random_numbers_are_torchs_bit_for_bit",
    ),
    Row(
        "`nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer`, `nn.Transformer`",
        "their attention, linear and norm layers as above; never the fast path in training",
        "attention::test_transformers_take_the_steps_of_their_linear_layers "
        "attention::test_evaluation_and_no_grad_are_torchs_own",
    ),
    Row(
        '`curvature="ekfac"`',
        "eigenvalues corrected in the Kronecker basis, for all layers above but norms, which are "
        "exact as they are",
        "ekfac::test_steps_are_those_of_the_dense_reference "
        "ekfac::test_eigenvalues_are_those_of_the_true_fisher_not_of_the_product",
    ),
    Row(
        "Models in the style of timm (packed attention, layer scale, stochastic depth, tokens)",
        "layers as above, free parameters with the fallback optimizer",
        EXACT,
    ),
    Row(
        "Tied weights",
        "one block, contributions added",
        f"{EXACT} exactness::test_embeddings_take_the_reference_step "
        "tied_weights::test_two_tied_layers_train_like_one_layer_called_twice",
    ),
    Row(
        "Low-rank adapters beside frozen weights",
        "as above; frozen weights cost nothing",
        "loops::test_low_rank_adapters_train_and_leave_the_frozen_weights_alone "
        "capture::test_frozen_parts_train_as_if_they_were_constants",
    ),
    Row(
        "Very wide layers",
        "a factor above `max_factor_size` is kept as its diagonal",
        "exactness::test_wide_layers_take_the_reference_step "
        "wide_layers::test_wide_layers_keep_no_square_of_the_width",
    ),
    Row(
        "`weight_norm`, `spectral_norm`, `parametrize`, pruning",
        "fallback, named in the log; named in a warning where it comes during training",
        "loops::test_layers_with_computed_weights_are_left_to_the_fallback "
        "loops::test_a_weight_that_becomes_computed_during_training_is_named",
    ),
    Row(
        "A weight used without its module",
        "refused, or where calls come too, a warning, with the layer's name",
        "bypassed_layers::test_they_use_the_fallback_and_the_other_layers_keep_their_curvature "
        "tied_weights::test_a_weight_tied_without_a_module_is_named",
    ),
    Row(
        "Modules with other code or geometry than their type's (`layer.forward = ...`, "
        "`_conv_forward`, `__class__`, `padding_mode` and such), at any time",
        "geometry as it is at the call; code that computes the same is served, other code is found "
        "at its first call: the layer is disabled and named, and its gradients are torch's",
        "adapters::test_gradients_are_torchs_whatever_a_module_computes "
        "adapters::test_geometry_is_read_at_the_call "
        "adapters::test_code_of_others_that_computes_the_same_is_served",
    ),
    Row(
        "Weights without elements",
        "fallback, named in the log",
        "watched_models::test_empty_weights_use_the_fallback_optimizer",
    ),
    Row(
        "Layers that see `[T, B, ...]` or `[B r, ...]` (sequence first, flattened positions, "
        "windows, frames)",
        "as with the examples in dimension 0, if the inputs of the model tell how many there are; "
        "else layers with other counts than most are named",
        "counting::test_steps_are_those_of_a_model_with_the_examples_in_front "
        "counting::test_half_batch_gradients_are_those_of_the_two_halves "
        "counting::test_where_the_inputs_disagree_layers_with_other_counts_are_named_with_both_numbers",
    ),
    Row(
        "Layers called once for the whole batch (position embeddings, relative biases)",
        "fallback, named in the log or, unless embeddings, in a warning",
        "counting::test_position_embeddings_are_named_at_info_and_together "
        "counting::test_modules_called_once_for_the_whole_batch_are_named_together",
    ),
    Row(
        "Random models of all these",
        "the dense reference's steps (`make fuzz`: thousands)",
        "fuzz::test_a_random_model_takes_the_reference_steps",
    ),
]

LOOPS = [
    Row(
        "Autocast, bf16 and fp16",
        "curvature in float32",
        "mixed_precision::"
        "test_curvature_under_autocast_is_that_of_the_rounded_values_in_single_precision",
    ),
    Row(
        "`GradScaler`",
        "changes nothing; steps lost to overflow lose and leak nothing",
        "safety::test_a_grad_scaler_changes_nothing "
        "mixed_precision::test_steps_lost_to_overflow_in_fp16_lose_and_leak_nothing",
    ),
    Row(
        "`GradScaler.unscale_` and a clip",
        "told apart with `optimizer.grad_scaler = scaler`; else a warning",
        "safety::test_unscaling_and_clipping_are_told_apart_with_the_scaler "
        "safety::test_without_the_scaler_a_clip_shrinks_the_curvature_of_its_step_and_is_named",
    ),
    Row(
        "Half-precision models",
        "curvature in float32",
        "safety::test_half_precision_models_keep_single_precision_curvature "
        "mixed_precision::test_a_pure_bf16_step_is_the_step_of_its_rounded_numbers",
    ),
    Row(
        "Clipping by norm and by value",
        "both halves follow the gradient",
        "accumulation::test_clipping_scales_average_and_difference_alike "
        "loops::test_clipping_by_value_is_the_step_of_the_clipped_gradient",
    ),
    Row(
        "Gradient accumulation, ragged too",
        "the step of the whole batch",
        "accumulation::test_one_batch_equals_k_microbatches "
        "exactness::test_ragged_microbatches_carry_their_weight_in_the_loss",
    ),
    Row(
        "Activation checkpointing, reentrant or not",
        "changes nothing",
        "capture::test_activation_checkpointing_changes_nothing",
    ),
    Row(
        "`torch.compile` of the model, before or after",
        "watched layers run between the graphs; refused by name where hooks can't fire",
        "compile::test_a_compiled_model_trains_like_a_plain_one "
        "errors::test_a_compiled_model_that_bypasses_the_hooks_is_named",
    ),
    Row(
        "`torch.compile` of `step` or of a whole training step",
        "the step itself runs uncompiled",
        "compile::test_a_compiled_optimizer_step_is_the_plain_one "
        "compile::test_a_compiled_training_step_is_the_plain_one",
    ),
    Row(
        "`torch.func`, `vmap`, forward-mode differentiation",
        "work, and leave no trace",
        "loops::test_function_transforms_work_and_leave_no_trace "
        "watched_models::test_derivatives_of_any_mode_are_those_of_an_unwatched_model",
    ),
    Row("In-place activations", "as any", EXACT),
    Row(
        "Several losses, backwards through parts",
        "each backward counts as a micro-batch",
        "loops::test_losses_backpropagated_one_by_one_count_as_microbatches",
    ),
    Row(
        "Several inputs; outputs in a dict",
        "as any",
        "loops::test_several_inputs_are_watched_each_at_its_layer "
        "loops::test_several_outputs_train_by_the_gradient_of_their_sum",
    ),
    Row("Models partly in eval", "as any", f"{EXACT} norms::{UNITWISE.tests.split('::')[-1]}"),
    Row(
        "Freezing and unfreezing",
        "curvature starts when a layer is first trained",
        "loops::test_a_layer_frozen_at_first_starts_with_curvature_of_its_own "
        "capture::test_a_bias_frozen_during_training_leaves_the_curvature_to_the_weight",
    ),
    Row(
        "`model.to` after construction",
        "state follows",
        "loops::test_state_follows_a_model_that_is_cast",
    ),
    Row(
        "Parameters or modules replaced after construction",
        "refused with the name, unless there is nothing to train",
        "loops::test_a_replaced_parameter_is_named "
        "watched_models::test_a_replaced_module_is_named_at_the_next_step "
        "watched_models::test_replaced_modules_that_need_no_training_are_fine",
    ),
    Row(
        "Averages of weights (`AveragedModel`), deep copies",
        "copies are not watched",
        "loops::test_averaged_models_follow_without_being_trained "
        "optimizer_contract::"
        "test_a_copy_of_the_model_trains_nothing_and_can_have_its_own_optimizer",
    ),
]

TRAINERS = [
    Row(
        f"{name}: {what}",
        "the plain loop, bit for bit",
        " ".join(f"trainers/{file}::{test}" for test in tests.split()),
    )
    for name, file, what, tests in [
        ("Lightning", "lightning", "automatic optimization", "test_automatic_optimization"),
        ("Lightning", "lightning", "manual optimization", "test_manual_optimization"),
        ("Lightning", "lightning", "`accumulate_grad_batches`", "test_accumulate_grad_batches"),
        (
            "Lightning",
            "lightning",
            "bf16, fp16",
            "test_bf16 test_fp16_with_a_scaler_that_first_overflows",
        ),
        (
            "Lightning",
            "lightning",
            "clipping",
            "test_clipping test_clipping_in_bf16_needs_the_plugin",
        ),
        ("Lightning", "lightning", "resume", "test_resumed_training_is_the_uninterrupted"),
        (
            "Hugging Face",
            "huggingface",
            "factory, mixin",
            "test_every_way_to_hand_over_the_optimizer",
        ),
        ("Hugging Face", "huggingface", "accumulation", "test_accumulation_with_a_ragged_end"),
        ("Hugging Face", "huggingface", "bf16", "test_bf16"),
        (
            "Hugging Face",
            "huggingface",
            "activation checkpointing",
            "test_activation_checkpointing_changes_nothing",
        ),
        ("Hugging Face", "huggingface", "resume", "test_resumed_training_is_the_uninterrupted"),
        (
            "Accelerate",
            "accelerate",
            "`prepare`, `accumulate`, bf16",
            "test_prepared_and_accumulated",
        ),
        (
            "Accelerate",
            "accelerate",
            "`save_state`, `load_state`",
            "test_resumed_training_is_the_uninterrupted",
        ),
        (
            "Plain loop",
            "plain_loop",
            "example",
            "test_the_example_learns_and_resumes_bit_for_bit",
        ),
    ]
]

SAFETY = [
    Row(
        "NaN or infinity in inputs, loss or one layer's gradient; empty batch; overflow of factors",
        "the step has no effect; training goes on as if it had not been",
        "injection::test_training_goes_on_as_if_the_bad_step_had_not_been "
        "safety::test_a_step_that_is_not_finite_changes_nothing",
    ),
    Row(
        "Factors of zero, singular, huge",
        "inverted as they are",
        "injection::test_a_damaged_factor_is_inverted_as_it_is",
    ),
    Row(
        "Indefinite factors",
        "more damping",
        "injection::test_an_indefinite_factor_is_inverted_with_more_damping_and_fades",
    ),
    Row(
        "Factors that are not finite",
        "a warning, and the average starts again",
        "injection::test_an_average_that_is_not_finite_starts_again",
    ),
    Row(
        "eigh or Cholesky raising",
        "a warning, the previous inverse, and another try",
        "safety::test_a_failed_decomposition_keeps_the_previous_inverse_and_says_so "
        "injection::test_a_decomposition_that_fails_once_loses_nothing_of_the_average",
    ),
    Row(
        "A batch of one",
        "a KFAC step, said once",
        "safety::test_one_example_a_step_is_a_kfac_step_and_said_once",
    ),
    Row(
        "A layer unused in some steps",
        "rests, and keeps its curvature",
        "injection::test_a_layer_unused_in_some_steps_keeps_its_curvature_and_disturbs_nobody",
    ),
    Row(
        "A state of another model, version or optimizer",
        "refused by name, nothing changed",
        "checkpoints::test_a_state_that_does_not_fit_is_named_and_changes_nothing "
        "checkpoints::test_the_state_of_another_optimizer_is_refused",
    ),
    Row(
        "A file cut short, a failure during loading",
        "nothing changed",
        "checkpoints::test_a_file_cut_short_is_refused_by_torch_and_changes_nothing "
        "checkpoints::test_loading_that_fails_half_way_changes_nothing",
    ),
    Row(
        "A state of another dtype",
        "goes on as if the model had been cast",
        "checkpoints::test_a_state_of_another_dtype_goes_on_as_if_the_model_had_been_cast",
    ),
    Row(
        "A state of another `damping_mode`",
        "goes on from the moving averages",
        "checkpoints::test_another_way_of_damping_goes_on_from_the_moving_averages",
    ),
    Row(
        "A state with a damaged entry or option",
        "refused by name, nothing changed",
        "checkpoints::test_every_damaged_entry_is_named_and_changes_nothing "
        "checkpoints::test_every_wrong_option_is_named_and_changes_nothing",
    ),
    Row(
        "Options of a loaded state",
        "those of its groups count, the constructor's others stay",
        "checkpoints::test_a_state_brings_the_options_of_its_groups_and_leaves_those_of_the_constructor",
    ),
    Row(
        "Resume",
        "bit for bit, `weights_only=True`",
        "optimizer_contract::test_a_resumed_run_is_the_uninterrupted_run_bit_for_bit "
        "checkpoints::test_odd_batches_and_the_models_zero_grad_resume_bit_for_bit "
        "checkpoints::test_a_bias_frozen_when_training_is_resumed_resumes_bit_for_bit",
    ),
    Row(
        "A gradient that is set aside and put back",
        "brings its halves along; a copy of it makes a KFAC step, and a warning",
        "belonging::test_a_gradient_that_comes_back_brings_what_was_captured "
        "belonging::test_a_copy_put_back_makes_a_kfac_step_and_is_said_once",
    ),
    Row(
        "A backward pass that failed, and was undone",
        "a KFAC step for the layers it had reached, and a warning",
        "belonging::test_a_failed_microbatch_that_is_undone_does_not_mix",
    ),
    Row(
        "Freezing, unfreezing or casting in the middle of a step",
        "the step of the gradients that are there",
        "toggling::test_what_is_toggled_before_step_is_toggled_after_it "
        "toggling::test_a_bias_frozen_between_passes_keeps_its_gradient_so_far "
        "toggling::test_a_model_cast_in_the_middle_of_a_step_goes_on_in_the_new_precision",
    ),
]


RANKS = [
    Row(
        "`DistributedDataParallel`, a plain module in a process group",
        "the step of one process on the same batch and halves; accumulation, clipping, uneven "
        "batches, all strategies",
        "distributed/equality::test_ranks_equal_one_process",
    ),
    Row(
        "FSDP2 (`fully_shard`)",
        "the step of one process; other layouts refused by name",
        "distributed/fsdp::test_sharded_models_equal_one_process",
    ),
    Row(
        "A NaN, an error or no data on one rank",
        "all ranks skip the step, or raise, together",
        "distributed/faults::test_ranks_act_together",
    ),
    Row(
        "Other settings on one rank, no gradient on one rank",
        "refused by all ranks with option and values; all skip the step, the rank says so",
        "distributed/one_rank_differs::test_all_ranks_hear_of_one_that_differs",
    ),
    Row(
        "Hugging Face Trainer, Accelerate, Lightning on two ranks",
        "save without a call by the user; killed and resumed, bit for bit the uninterrupted run",
        "trainers/ranks::test_killed_and_resumed_training_is_the_uninterrupted",
    ),
    Row(
        "Another number of ranks",
        "the same training, from a consolidated state",
        "distributed/faults::test_training_resumes_on_other_numbers_of_ranks",
    ),
    Row(
        "A worker killed, a worker that hangs, two hosts",
        "a restart with the same result; an error with rank, message and layers; the same step",
        "distributed/elastic::test_a_killed_worker_leads_to_a_restart_and_the_same_result "
        "distributed/elastic::test_a_rank_that_hangs_makes_the_others_name_rank_message_and_layers "
        "distributed/elastic::test_two_hosts_equal_one_process",
    ),
]


def layers() -> list[Row]:
    """One row for every registered type; a new adapter needs its line in ADAPTERS."""
    rows = []
    for module, adapter in REGISTERED.items():
        row = UNITWISE if issubclass(adapter, NormAdapter) else ADAPTERS[adapter.__name__]
        rows.append(row._replace(what=_name(module)))
    return rows + OTHER_LAYERS


def _name(module: type[nn.Module]) -> str:
    return f"`nn.{module.__name__}`"


def sections() -> dict[str, list[Row]]:
    return {
        "Layers": layers(),
        "Loops": LOOPS,
        "Trainers": TRAINERS,
        "Several ranks": RANKS,
        "Safety": SAFETY,
    }


def named_tests() -> Iterator[tuple[Path, str]]:
    for rows in sections().values():
        for row in rows:
            for test in row.tests.split():
                yield _location(test)


def _location(test: str) -> tuple[Path, str]:
    place, function = test.split("::")
    folder, _, file = place.rpartition("/")
    return ROOT / "tests" / folder / f"test_{file}.py", function


@cache
def defined_tests(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def page() -> str:
    lines = [
        "# What is supported, how, and which test shows it",
        "",
        "Generated by `python -m tests.support` from the registry of layers and the tests.",
    ]
    for title, rows in sections().items():
        lines += ["", f"## {title}", "", "| what | how | shown by |", "|---|---|---|"]
        for row in rows:
            shown = "<br>".join(_link(test) for test in row.tests.split())
            lines.append(f"| {row.what} | {row.how} | {shown} |")
    return "\n".join([*lines, ""])


def _link(test: str) -> str:
    path, function = _location(test)
    return f"[`{function}`](../{path.relative_to(ROOT).as_posix()})"


if __name__ == "__main__":
    PAGE.write_text(page())
