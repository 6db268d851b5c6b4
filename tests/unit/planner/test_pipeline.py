# SPDX-License-Identifier: Apache-2.0
"""The plan of each rank of a pipeline: its stages, and the micro-batches that it keeps.

test_ranks.py compares the same plans with live tensors.
"""

import pytest
from transformers import AutoConfig

from launching import CONFIGS
from planner import yaml_files
from planner.errors import UnplannableError
from planner.ledger import both
from planner.pipeline import fullest, peaks_of_ranks
from planner.plan import plan_of
from planner.recipe import parse_words
from planner.request import Batch
from planner.shapes import MemoizedBuild

BUILD = MemoizedBuild()
LENGTH = 64
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "vocab_size": 100,
}
CONFIG = AutoConfig.for_model("llama", **SHAPE)
TIED = AutoConfig.for_model("llama", **SHAPE, tie_word_embeddings=True)
SCHEDULES = ("1f1b", "gpipe", "interleaved", "interleaved_zero_bubble", "zbv")
PER_ELEMENT = 4  # bytes in fp32


def plan_with(words, ranks, config="pp", precision="no"):
    args = parse_words(words, "llama_pipeline.py")
    return plan_of(args, yaml_files.read(CONFIGS / f"{config}.yaml"), ranks, None, precision)


def peaks_with(*words, rows=8, ranks=4, config=CONFIG, evaluates=False):
    sizes = ["--max_length", str(LENGTH), "--per_device_train_batch_size", str(rows)]
    if not evaluates:
        sizes += ["--eval_strategy", "no"]
    plan = plan_with([*sizes, *words], ranks)
    return peaks_of_ranks(plan, config, Batch(rows, LENGTH, rows * LENGTH), BUILD)


def elements_of(config):
    return sum(parameter.numel() for parameter in BUILD(parse_words([]), config).parameters())


def parameters_of(peaks):
    return [both(peak.device, peak.host)["parameters"] for peak in peaks]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_stages_of_all_ranks_are_the_model(schedule):
    peaks = peaks_with("--pp_size", "4", "--pipeline_schedule", schedule)
    assert sum(parameters_of(peaks)) == PER_ELEMENT * elements_of(CONFIG)
    layers = sorted(number for peak in peaks for stage in peak.stages for number in stage.layers)
    assert layers == list(range(8))


def test_a_shared_embedding_is_held_at_both_ends():
    first, last = parameters_of(peaks_with("--pp_size", "2", ranks=2, config=TIED))
    embedding = SHAPE["vocab_size"] * SHAPE["hidden_size"]
    assert first + last == PER_ELEMENT * (elements_of(TIED) + embedding)


def test_the_rank_of_a_folded_pipeline_with_both_ends_holds_a_shared_embedding_once():
    words = ("--pp_size", "2", "--pipeline_schedule", "zbv")
    peaks = peaks_with(*words, ranks=2, config=TIED)
    assert sum(parameters_of(peaks)) == PER_ELEMENT * elements_of(TIED)
    assert peaks[0].describe() == "embedding, layers 0-1, layers 6-7, head"


def test_the_hosts_of_pipelines_are_those_of_the_launch():
    """What a save takes on a host depends on how many ranks it has."""
    args = parse_words(["--pp_size", "2"], "llama_pipeline.py")
    plan = plan_of(args, yaml_files.read(CONFIGS / "pp.yaml"), num_processes=8, num_machines=2)
    assert plan.machines == 2


def activations_of(schedule, rows):
    peaks = peaks_with("--pp_size", "4", "--pipeline_schedule", schedule, rows=rows)
    return [peak.device["activations"] for peak in peaks]


def test_under_1f1b_each_rank_keeps_one_micro_batch_less_than_the_one_before():
    first, second, third, _ = activations_of("1f1b", 8)
    assert [first, second, third] == activations_of("1f1b", 16)[:3]
    assert second / third == pytest.approx(3 / 2, rel=0.1)


def test_gpipe_keeps_all_micro_batches():
    _, few, *_ = activations_of("gpipe", 8)
    _, many, *_ = activations_of("gpipe", 16)
    assert many / few == pytest.approx(2, rel=0.1)


def test_buffers_of_messages_wait_for_every_micro_batch():
    _, few, *_ = peaks_with("--pp_size", "4", rows=8)
    _, many, *_ = peaks_with("--pp_size", "4", rows=16)
    message = PER_ELEMENT * LENGTH * SHAPE["hidden_size"]
    grown = many.device["communication"] - few.device["communication"]
    assert grown == 8 * 2 * message  # hidden states, and their gradients


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_fsdp2_within_stages_halves_weights_and_optimizer_state(schedule):
    words = ("--pp_size", "2", "--pipeline_schedule", schedule)
    replicas = peaks_with(*words)
    sharded = peaks_with(*words, "--shard_stages")
    for whole, half in zip(replicas, sharded, strict=True):
        for category in ("parameters", "optimizer"):
            assert 2 * half.device[category] == whole.device[category]
        assert half.bytes < whole.bytes


def test_whole_gradients_of_sharded_stages_add_up_in_the_precision_of_reductions():
    """A rank has half of the parameters in fp32; whole they are in bf16, and gradients in fp32."""
    plan = plan_with(["--shard_stages", "--eval_strategy", "no"], 4, precision="bf16")
    for peak in peaks_of_ranks(plan, CONFIG, Batch(8, LENGTH, 8 * LENGTH), BUILD):
        elements = 2 * peak.device["parameters"] // PER_ELEMENT
        assert peak.device["unsharded"] > (2 + 2) * elements


def test_gradients_of_the_second_part_of_a_backward_pass_wait_to_be_added_up():
    """Under zbv, on the rank without embedding and head: in bf16 beside those in fp32."""
    words = ["--shard_stages", "--eval_strategy", "no", "--pipeline_schedule", "zbv"]
    plan = plan_with(words, 4, precision="bf16")
    _, peak = peaks_of_ranks(plan, CONFIG, Batch(8, LENGTH, 8 * LENGTH), BUILD)
    elements = 2 * peak.device["parameters"] // PER_ELEMENT
    assert peak.device["unsharded"] > (2 + 4) * elements


@pytest.mark.parametrize(("schedule", "more"), [("zbv", ()), ("1f1b", ("--shard_stages",))])
def test_a_large_batch_of_evaluation_counts(schedule, more):
    words = ("--pp_size", "2", "--pipeline_schedule", schedule, *more)
    trained = fullest(peaks_with(*words))
    small = fullest(peaks_with(*words, "--per_device_eval_batch_size", "1", evaluates=True))
    large = fullest(peaks_with(*words, "--per_device_eval_batch_size", "999", evaluates=True))
    assert small.bytes == trained.bytes
    assert large.bytes > trained.bytes


@pytest.mark.parametrize("words", [[], ["--shard_stages"]])
def test_a_checkpoint_in_the_background_takes_a_rank_its_share_of_its_stages(words):
    peaks = peaks_with("--pp_size", "2", "--async_save", *words)
    found = [peak.host["checkpoint"] for peak in peaks]
    assert len(found) == 2 and sum(2 * share for share in found) == 12 * elements_of(CONFIG)


def test_names_say_how_ranks_with_the_same_stages_share_them():
    assert plan_with([], 2).name == "PP 2, 1f1b"
    assert plan_with(["--pp_size", "4"], 8).name == "PP 4 x replicas 2, 1f1b"
    sharded = plan_with(["--pipeline_schedule", "zbv", "--shard_stages"], 8)
    assert (sharded.name, sharded.shards, sharded.replicas) == ("PP 2 x FSDP2 4, zbv", 4, 1)


REFUSED = {
    ("pp", 3): ((), "--pp_size 2 does not divide 3 ranks"),
    ("fsdp", 4): ((), "no engine of a YAML shards a pipeline"),
    ("deepspeed_zero3", 4): ((), "no engine of a YAML shards a pipeline"),
    ("tp", 2): ((), "no engine of a YAML shards a pipeline"),
    ("ddp", 2): (("--num_microbatches", "3"), "does not divide"),
    ("pp", 4): (("--dtype", "bfloat16"), "--no_master_weights"),
    ("pp", 8): (
        ("--gradient_checkpointing", "--pipeline_schedule", "zbv"),
        "cannot be planned, since torch computes a checkpointed layer again",
    ),
}


@pytest.mark.parametrize("place", REFUSED, ids=lambda place: "-".join(map(str, place)))
def test_what_the_recipe_would_refuse_is_refused(place):
    config, ranks = place
    words, message = REFUSED[place]
    with pytest.raises(UnplannableError, match=message):
        plan_with(list(words), ranks, config)


def test_fp16_is_refused():
    with pytest.raises(UnplannableError, match="loss scale"):
        plan_with([], 2, precision="fp16")


def test_a_model_with_fewer_layers_than_stages_is_refused(capsys):
    words = ("--pp_size", "8", "--pipeline_schedule", "interleaved")
    with pytest.raises(SystemExit):
        peaks_with(*words, ranks=8)
    assert "has 8 layers" in capsys.readouterr().err
