# SPDX-License-Identifier: Apache-2.0
"""A model cut into stages computes what the whole one does, with the names of the whole one."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, core_model_loading

import llama_pipeline
from components.cli import parse_arguments
from components.pipeline_kinds import KINDS
from components.pipeline_stages import (
    Elsewhere,
    PartOfModel,
    check_stages,
    cut_into_stages,
    describe_pipeline,
    view_of,
    why_not_cut,
)
from components.weights import make_skeleton

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 5,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
    },
    "qwen3": {"head_dim": 16},
}
OPTIONS = {"dtype": "float32", "attn_implementation": "sdpa"}


def save_model(folder, kind, **changes):
    """Write a small random model of a family, and return it as it is loaded."""
    config = AutoConfig.for_model(kind, **SHAPE | FAMILIES.get(kind, {}) | changes)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, **OPTIONS)


def names_of(model):
    return {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "counts"),
    [(4, 2, [2, 2]), (5, 2, [3, 2]), (22, 4, [5, 6, 6, 5]), (7, 3, [2, 3, 2]), (3, 3, [1, 1, 1])],
)
def test_stages_have_equal_parts_and_those_in_the_middle_what_is_left_over(
    num_layers, num_stages, counts
):
    stages = cut_into_stages(num_layers, num_stages)
    assert [len(stage.layers) for stage in stages] == counts
    assert [number for stage in stages for number in stage.layers] == list(range(num_layers))
    assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
    assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_stages_one_after_the_other_compute_the_logits_of_the_whole(
    kind, schedule, is_tied, tmp_path
):
    whole = save_model(tmp_path, kind, tie_word_embeddings=is_tied)
    per_rank = KINDS[schedule].stages_per_rank
    stages = cut_into_stages(5, 2 * per_rank)
    views = {}
    names = set()
    for rank in range(2):
        own = [stages[number] for number in KINDS[schedule].stages_of(rank, 2)]
        part = PartOfModel(own).from_pretrained(tmp_path, **OPTIONS)
        assert type(part).__name__ == type(whole).__name__
        assert len(names_of(part)) < len(names_of(whole))
        names |= names_of(part)
        for stage in own:
            views[stage.index] = view_of(part, stage)
    assert names == names_of(whole)  # A tied head has the name of the embedding on both ends

    tokens = torch.randint(3, 64, (2, 9))
    hidden = views[0].model(input_ids=tokens, use_cache=False).last_hidden_state
    for index in range(1, len(stages) - 1):
        hidden = views[index].model(inputs_embeds=hidden, use_cache=False).last_hidden_state
    logits = views[len(stages) - 1](inputs_embeds=hidden, use_cache=False).logits
    assert torch.equal(logits, whole(input_ids=tokens).logits)


def test_a_part_holds_no_weight_of_another_rank(tmp_path):
    whole = save_model(tmp_path, "llama")
    first, last = cut_into_stages(5, 2)
    sizes = []
    for stage in (first, last):
        part = PartOfModel([stage]).from_pretrained(tmp_path, **OPTIONS)
        sizes.append(sum(weight.numel() for weight in part.parameters()))
        for number, layer in enumerate(part.model.layers):
            assert isinstance(layer, Elsewhere) == (number not in stage.layers)
    assert sum(sizes) == sum(weight.numel() for weight in whole.parameters())


def test_a_part_reads_no_weight_of_another_rank_from_the_files(tmp_path, monkeypatch):
    whole = save_model(tmp_path, "llama")
    read = []
    copy_of = core_model_loading._materialize_copy

    def note_and_copy(tensor, *options):
        copied = copy_of(tensor, *options)
        read.append(copied.numel())
        return copied

    monkeypatch.setattr(core_model_loading, "_materialize_copy", note_and_copy)
    stage = cut_into_stages(5, 2)[0]
    part = PartOfModel([stage]).from_pretrained(tmp_path, **OPTIONS)
    assert sum(read) == sum(weight.numel() for weight in part.parameters())
    assert sum(read) < sum(weight.numel() for weight in whole.parameters())


def test_a_new_part_has_the_weights_of_its_stages(tmp_path):
    save_model(tmp_path, "llama")
    config = AutoConfig.from_pretrained(tmp_path)
    part = PartOfModel(cut_into_stages(5, 5)[1:2]).from_config(config, **OPTIONS)
    assert {name.partition(".self_attn")[0].partition(".mlp")[0] for name in names_of(part)} == {
        "model.layers.1",
        "model.layers.1.input_layernorm.weight",
        "model.layers.1.post_attention_layernorm.weight",
    }


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_of_the_family_can_be_cut(kind, tmp_path):
    save_model(tmp_path, kind)
    assert why_not_cut(make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS)) == ""


def test_what_a_model_computes_between_its_modules_is_found(tmp_path):
    save_model(tmp_path, "granite", embedding_multiplier=2.0)
    reason = why_not_cut(make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS))
    assert reason.startswith("it computes more between its embedding, layers and norm")


def test_a_model_with_other_modules_is_found(tmp_path):
    config = AutoConfig.for_model("gpt2", n_embd=32, n_layer=2, n_head=2, vocab_size=64)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    reason = why_not_cut(make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS))
    assert reason == "it has no embed_tokens, layers, norm, model"


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        ("--pp_size 4 --pipeline_schedule zbv", "use --pipeline_schedule 1f1b, which has one"),
        ("--pp_size 6", "use --pp_size 3\n"),
        ("--pp_size 7", "use --pp_size 5 and pass --num_processes 5 to accelerate launch\n"),
    ],
)
def test_more_stages_than_layers_are_refused(flags, cure, tmp_path, capsys):
    save_model(tmp_path, "llama")
    args = parse_arguments(llama_pipeline.Arguments, words=flags.split())
    outline = make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS)
    capsys.readouterr()  # The progress of writing the model
    with pytest.raises(SystemExit, match="64"):
        check_stages(args, outline)
    error = capsys.readouterr().err
    assert f"and the model has 5 layers: {cure}" in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--attn_implementation flash_attention_2", "use sdpa"),
        ("--shard_stages --pipeline_schedule zbv", "use --pipeline_schedule interleaved_zero"),
    ],
)
def test_what_a_pipeline_cannot_do_with_a_model_is_refused(flags, says, tmp_path, capsys):
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    args = parse_arguments(llama_pipeline.Arguments, words=flags.split())
    outline = make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS)
    capsys.readouterr()  # The progress of writing the model
    with pytest.raises(SystemExit, match="64"):
        check_stages(args, outline)
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1


def test_a_model_that_fits_is_cut(tmp_path):
    save_model(tmp_path, "llama", tie_word_embeddings=True)
    args = parse_arguments(llama_pipeline.Arguments, words=["--shard_stages"])
    stages = check_stages(args, make_skeleton(AutoModelForCausalLM, tmp_path, OPTIONS))
    assert [list(stage.layers) for stage in stages] == [[0, 1, 2], [3, 4]]
    says = "2 stages of 3 + 2 layers on 2 ranks, 1f1b, each batch in 8 micro-batches of 1 row"
    assert describe_pipeline(args, stages) == says
