# SPDX-License-Identifier: Apache-2.0
"""The files of examples/ say what the planner says, name a command that works, and fit their
cards."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from components.checks import find_conflicts
from components.cli import find_out_of_bounds
from launching import REPO
from publish import examples, public_models

EXAMPLES = {example.path.stem: example for example in examples.read_examples()}
# As the page of each model on the hub says
NUM_PARAMETERS = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "Qwen/Qwen3-0.6B-Base": 596_049_920,
    "Qwen/Qwen3-8B": 8_190_735_360,
}


def test_there_are_eight_files_of_all_kinds():
    assert len(EXAMPLES) == 8
    assert {example.num_processes for example in EXAMPLES.values()} == {1, 2, 8}
    methods = {example.method.partition(",")[0] for example in EXAMPLES.values()}
    assert methods == {"full", "LoRA", "QLoRA"}
    assert {example.recipe for example in EXAMPLES.values()} == {"llama", "mistral_pretrain"}


def test_heads_and_table_are_what_the_planner_says():
    for path, text in examples.pages().items():
        assert path.read_text() == text, f"{path.name}: run python evidence/write_examples.py"


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_command_names_this_file_and_the_plan_fits_the_card(name):
    example = EXAMPLES[name]
    words = examples.launch_words(example.text, example.path)
    assert words[-2:] == ["--config", f"examples/{name}.yaml"]
    assert (REPO / example.config_file).is_file()
    assert (REPO / "recipes" / f"{example.recipe}.py").is_file()
    assert example.args.output_dir == f"runs/{name}"
    assert examples.plan(example).fits


@pytest.mark.parametrize("name", EXAMPLES)
def test_no_argument_of_an_example_is_refused(name):
    args = EXAMPLES[name].args
    assert find_out_of_bounds(args) == []
    about_the_hub = "--model_name_or_path"
    assert [line for line in find_conflicts(args) if not line.startswith(about_the_hub)] == []


@pytest.mark.parametrize("model", public_models.SHAPES)
def test_a_shape_is_that_of_the_public_model(model):
    with torch.device("meta"):
        shaped = AutoModelForCausalLM.from_config(public_models.config_of(model))
    assert shaped.num_parameters() == NUM_PARAMETERS[model]


def test_the_planned_memory_follows_the_arguments():
    example = EXAMPLES["smollm2_135m_full"]
    smaller = dataclasses.replace(example.args, per_device_train_batch_size=1)
    changed = dataclasses.replace(example, args=smaller)
    assert examples.plan(changed).peak < examples.plan(example).peak
    assert examples.with_plan(changed, examples.plan(changed)) != example.text


def test_pretraining_is_planned_with_its_own_arguments():
    example = EXAMPLES["qwen3_0.6b_pretrain"]
    planned = examples.planned_arguments(example)
    assert planned.packing
    for name in ("max_length", "per_device_train_batch_size", "gradient_checkpointing"):
        assert getattr(planned, name) == getattr(example.args, name)


def test_a_head_without_its_lines_is_told(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text("seed: 3\n")
    with pytest.raises(ValueError, match="no line `# Planned memory"):
        examples.read_example(path)
    path.write_text("# Planned memory: 1 GiB per GPU, for a 4090 with 2 GiB.\nseed: 3\n")
    with pytest.raises(ValueError, match="no launch command"):
        examples.read_example(path)
    with pytest.raises(ValueError, match="needs one <!-- examples -->"):
        examples.with_table("no marks", [], [])
    with pytest.raises(ValueError, match="org/model: has no entry"):
        public_models.config_of("org/model")
