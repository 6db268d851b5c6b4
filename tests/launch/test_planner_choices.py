# SPDX-License-Identifier: Apache-2.0
"""plan_memory.py without --config_file: what it lists fits, and its commands are launches."""

import json
import shlex
import sys

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import LlamaConfig

from launching import REPO, run

BATCH = ["--per_device_train_batch_size", "32", "--max_length", "1024"]
ADAPTERS = ["--use_peft", "--gradient_checkpointing"]
# One layer of 128 values; and one of 3.4 billion parameters, of which more GPUs hold parts
SIZES = {
    "small": {"hidden_size": 128, "intermediate_size": 448, "num_hidden_layers": 1},
    "wide": {"hidden_size": 6144, "intermediate_size": 21504, "num_hidden_layers": 7},
}
HEADS = {"small": (4, 4), "wide": (32, 8)}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, sizes in SIZES.items():
        heads, groups = HEADS[name]
        sizes |= {"num_attention_heads": heads, "num_key_value_heads": groups}
        LlamaConfig(vocab_size=1000, **sizes).save_pretrained(folder / name)
    return folder


def plan(*words):
    """Return the exit code and the report of plan_memory.py."""
    done = run(sys.executable, REPO / "scripts" / "plan_memory.py", *words, "--json", "-")
    return done.returncode, json.loads(done.output[done.output.index("{") :])


def peak_of(command, card, *more):
    """The planned bytes at the peak of a launch command, on a card with `card` bytes."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    launch = launch_command_parser().parse_args(words[2:])  # accelerate takes it
    assert launch.training_script == "recipes/llama.py" and (REPO / launch.config_file).is_file()
    _, report = plan(*words[2:], *more, "--gpu", f"{card / 2**30}GiB")
    return report["peak"]


def test_what_is_listed_fits_as_its_command_is_planned(models):
    call = ["--gpu", "4GiB", "--num_gpus", "4", "--gradient_checkpointing", *BATCH]
    code, report = plan(models / "small", *call)
    assert code == 0 and len(report["rows"]) > 4
    card = report["card"]
    first, last = report["rows"][0], report["rows"][-1]
    for row in (first, last):
        assert peak_of(row["command"], card) == row["peak"] <= card


def test_what_the_user_gave_stays(models):
    launcher = ["--gpu", "6GiB", "--num_gpus", "2", "--mixed_precision", "fp16"]
    flags = [*ADAPTERS, "--lora_r", "4", "--learning_rate", "0.001"]
    _, report = plan(models / "small", *launcher, "--dataset_name", "rows.jsonl", *flags)
    weights = {row["weights"] for row in report["rows"]}
    assert weights == {"LoRA", "LoRA, int8", "LoRA, nf4", "LoRA, nf4 dq"}
    for row in report["rows"]:
        for words in (*[" ".join(flags[i : i + 2]) for i in (2, 4)], "--gradient_checkpointing"):
            assert words in row["command"]
        assert "--dataset_name rows.jsonl" in row["command"]
        assert "--num_processes 2 " in row["command"]
        assert "--mixed_precision fp16 " in row["command"]


def test_where_nothing_fits_it_is_said_how_much_is_missing(models):
    words = [models / "small", "--gpu", "1GiB", *BATCH, *ADAPTERS]
    done = run(sys.executable, REPO / "scripts" / "plan_memory.py", *words)
    assert done.returncode == 1 and "0 of " in done.output
    assert "LoRA, nf4: does not fit, at least " in done.output


def test_where_only_offload_fits_it_is_listed(models):
    batch = ["--per_device_train_batch_size", "1", "--max_length", "32", "--load_in_4bit"]
    code, report = plan(models / "wide", "--gpu", "2.6GiB", *batch, *ADAPTERS)
    assert code == 0 and all("offload" in row["config_file"] for row in report["rows"])


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--num_gpus", "0"], "--num_processes"),
        (["--max_length", "0"], "--max_length"),
        (["--use_peft", "--load_in_4bit", "--load_in_8bit"], "choose"),
        (["--use_peft", "--lora_target_modules", "w1"], "w1"),
    ],
)
def test_a_wrong_call_is_one_line(words, word, models):
    command = [sys.executable, REPO / "scripts" / "plan_memory.py", models / "small"]
    done = run(*command, "--gpu", "24GB", *words)
    assert done.returncode == 64 and word in done.output, done.output
    assert len(done.output.splitlines()) == 1
