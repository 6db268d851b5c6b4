# SPDX-License-Identifier: Apache-2.0
"""plan_memory.py without --config_file: what it lists fits, nothing more would, and its commands
are launches."""

import contextlib
import functools
import io
import json
import shlex
import sys
from typing import NamedTuple

import pytest
from accelerate.commands.launch import launch_command_parser

import plan_memory
from launching import REPO
from measured.validation import BASE, config_of
from planner import candidates, recipe, yaml_files
from planner.cards import bytes_of_known, with_constants
from planner.closed_form import closed_form
from planner.plan import plan_of
from planner.request import SIZES, Request, batch_of
from planner.shapes import MemoizedBuild, read_model_config

LAUNCHER = launch_command_parser()
read_config_once = functools.cache(read_model_config)
BUILD = MemoizedBuild()
# One layer: hundreds of plans are made in each test, and more layers would be more of the same
SMALL = config_of(BASE | {"width": 128, "depth": 1, "vocab": 1000})
# 3.4 billion parameters: what a rank holds is weights, which more GPUs share
WIDE = config_of(
    BASE | {"width": 6144, "ratio": 3.5, "depth": 7, "heads": 32, "kv_heads": 8, "vocab": 1000}
)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    for name, config in {"small": SMALL, "wide": WIDE}.items():
        config.save_pretrained(folder / name)
    return folder


@pytest.fixture(scope="module")
def choose(models):
    """choose(words): (exit code, report) of a call, whose model stands for its folder."""

    @functools.cache
    def call(words):
        name, *others = words.split()
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            words = ["plan_memory.py", str(models / name), *others, "--json", "-"]
            patch.setattr(sys, "argv", words)
            code = plan_memory.main()
        return code, json.loads(out.getvalue())

    return call


class Planned(NamedTuple):
    """The plan of a launch command: bytes at the peak, and the recipe's arguments."""

    peak: int
    args: recipe.RecipeArguments


def plan_command(command, card, **values):
    """Plan a launch command on a card of `card` bytes. The launcher, the recipe and the planner
    read it; `values` replace the recipe's arguments."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    launch = LAUNCHER.parse_args(words[2:])
    assert (REPO / launch.config_file).is_file()
    assert launch.training_script == "recipes/llama.py"
    args = recipe.parse_words(launch.training_script_args)
    assert args.max_logits_mib is None
    args = recipe.with_values(args, max_logits_mib=recipe.logits_mib_on(card))
    args = recipe.with_values(args, **values)
    sizes = {}
    for key in SIZES:
        size = getattr(launch, f"parallelism_config_{key}")
        if size is not None and f"--parallelism_config_{key}" in words:
            sizes[key] = int(size)
    config = yaml_files.with_sizes(yaml_files.read(REPO / launch.config_file), sizes)
    plan = plan_of(args, config, launch.num_processes, launch.num_machines, launch.mixed_precision)
    model = read_config_once(args.model_name_or_path)
    device, _ = closed_form(plan, model, batch_of(args, Request()), BUILD)
    return Planned(sum(with_constants(device, plan.ranks).values()), args)


BATCH = "--per_device_train_batch_size 32 --max_length 1024"
CALLS = {
    "one GPU": f"small --gpu 4GiB {BATCH}",
    "four GPUs": f"small --gpu 4GiB --num_gpus 4 --gradient_checkpointing {BATCH}",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_listed_fits_as_its_command_is_planned(choose, call):
    code, report = choose(call)
    assert code == 0
    assert report["rows"]
    for row in report["rows"][::2]:
        planned = plan_command(row["command"], report["card"])
        assert planned.peak == row["peak"] == sum(row["device"].values()) <= report["card"]
        assert planned.args.gradient_checkpointing == row["gradient_checkpointing"]
        assert planned.args.use_peft == (row["weights"] != "full")
        assert row["reasons"]


LIMITS = {
    "per_device_train_batch_size": candidates.MOST_SEQUENCES,
    "max_length": SMALL.max_position_embeddings,
}


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_largest_batch_and_length_fit_and_larger_ones_do_not(choose, call, name):
    """Evaluation takes one row at a time if more would not fit."""
    _, report = choose(call)
    light = {"per_device_eval_batch_size": 1}
    for row in report["rows"][::3]:
        size = row[f"largest_{name}"]
        largest = plan_command(row["command"], report["card"], **light, **{name: size})
        assert largest.peak <= report["card"]
        if size < LIMITS[name]:
            larger = plan_command(row["command"], report["card"], **light, **{name: size + 1})
            assert larger.peak > report["card"]


def test_what_the_user_gave_stays(choose):
    launcher = "--gpu 6GiB --num_gpus 2 --mixed_precision fp16"
    flags = "--use_peft --gradient_checkpointing --lora_r 4 --lora_target_modules q_proj v_proj"
    _, report = choose(f"small {launcher} --dataset_name rows.jsonl {flags} --learning_rate 0.001")
    weights = {row["weights"] for row in report["rows"]}
    assert weights == {"LoRA", "LoRA, int8", "LoRA, nf4", "LoRA, nf4 dq"}
    for row in report["rows"]:
        _, args = plan_command(row["command"], report["card"])
        assert args.gradient_checkpointing
        assert args.use_peft
        assert args.dtype == "float16"
        assert args.lora_r == 4
        assert args.lora_target_modules == ["q_proj", "v_proj"]
        assert args.learning_rate == 0.001
        assert args.dataset_name == ["rows.jsonl"]
        assert "--num_processes 2 " in row["command"]
        assert "--mixed_precision fp16 " in row["command"]


@pytest.fixture
def changes(choose):
    """Changes for a batch and rows that are too large by far, for GPUs that hold the weights."""
    code, report = choose(f"small --gpu 1GiB {BATCH} --use_peft --gradient_checkpointing")
    assert code == 1
    assert not report["rows"]
    assert report["closest"]["peak"] > report["card"]
    return report["card"], {one["change"].split(":")[0]: one for one in report["changes"]}


def test_nothing_fits_and_each_change_is_enough(changes):
    card, by_kind = changes
    assert list(by_kind) == ["a smaller batch", "shorter rows", "another card"]
    name = by_kind["another card"]["change"].split()[2].rstrip(",")
    cards = {"another card": bytes_of_known(name)}
    for kind, change in by_kind.items():
        size = cards.get(kind, card)
        assert plan_command(change["command"], size).peak == change["peak"] <= size


def test_a_smaller_batch_keeps_the_rows_of_a_step(changes):
    card, by_kind = changes
    args = plan_command(by_kind["a smaller batch"]["command"], card).args
    assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32


def test_shorter_rows_are_as_long_as_fits(changes):
    card, by_kind = changes
    command = by_kind["shorter rows"]["command"]
    length = plan_command(command, card).args.max_length
    assert plan_command(command, card, max_length=length + 1).peak > card


def test_where_only_offload_fits_more_gpus_are_proposed(choose):
    batch = "--per_device_train_batch_size 1 --max_length 32"
    code, report = choose(
        f"wide --gpu 2.6GiB {batch} --use_peft --load_in_4bit --gradient_checkpointing"
    )
    assert code == 0
    assert all("offload" in row["config_file"] for row in report["rows"])
    assert "offload" not in report["closest"]["config_file"]
    more = next(one for one in report["changes"] if "GPUs" in one["change"])
    ranks = int(more["change"].split()[-1])
    assert f"--num_processes {ranks}" in more["command"]
    assert plan_command(more["command"], report["card"]).peak <= report["card"]
    if ranks > 2:
        fewer = more["command"].replace(f"--num_processes {ranks}", f"--num_processes {ranks // 2}")
        assert plan_command(fewer, report["card"]).peak > report["card"]


def test_the_terminal_shows_a_table_and_the_launch(models, capsys, monkeypatch):
    words = ["plan_memory.py", str(models / "small"), "--gpu", "h200", "--num_gpus", "4"]
    monkeypatch.setattr(sys, "argv", words)
    assert plan_memory.main() == 0
    out = capsys.readouterr().out
    assert max(map(len, out.replace(str(models), "").splitlines())) <= 120
    for expected in (" more: --json -", "LoRA, nf4 dq", "full weights"):
        assert expected in out
    paragraphs = out.replace("\\\n", " ").split("\n\n")
    launches = [text for text in paragraphs if text.startswith("accelerate launch")]
    card = bytes_of_known("h200")
    assert [plan_command(text, card).args.use_peft for text in launches] == [True, False]


WRONG = {
    "small --gpu 24GB --num_gpus 0": "--num_processes 0",
    "small --gpu 24GB --max_length 0": "--max_length 0",
    "small --gpu 24GB --use_peft --load_in_4bit --load_in_8bit": "choose one",
    "small --gpu 24GB --simulate": "--config_file",
    "small --gpu 24GB --lora_target_modules w1 --use_peft": "no such layers",
}


def code_of(main):
    """The exit code of a command, whether it is returned or raised by the recipe's own parser."""
    try:
        return main()
    except SystemExit as stop:
        return stop.code


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_one_line(models, words, capsys, monkeypatch):
    name, *others = words.split()
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", str(models / name), *others])
    assert code_of(plan_memory.main) == 64
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert WRONG[words] in lines[0]
