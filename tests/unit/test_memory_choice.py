"""plan_memory.py without --config_file: what is listed fits, nothing more would, and the commands are launches."""

import contextlib
import functools
import io
import json
import shlex
import sys
from types import SimpleNamespace

import pytest
from accelerate.commands.launch import launch_command_parser

import memory_choice
import plan_memory
from launching import REPO
from memory_cards import CARDS, GIB, constants_of, pieces_on
from memory_choice import LINES_AT_MOST, largest
from memory_plan import closed_form, plan_of
from model_shapes import read_config
from validate_planner import BASE, config_of, recipe_arguments

LAUNCHER, read_config = launch_command_parser(), functools.cache(read_config)
SMALL = config_of(BASE | {"width": 128, "depth": 2, "vocab": 1000})
# 3.5 billion parameters: what a rank holds is weights, which more GPUs share
WIDE = config_of(
    BASE | {"width": 4096, "ratio": 3.5, "depth": 16, "heads": 32, "kv_heads": 8, "vocab": 1000}
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
        out, before = io.StringIO(), sys.argv
        sys.argv = ["plan_memory.py", str(models / name), *others, "--json", "-"]
        try:
            with contextlib.redirect_stdout(out):
                code = plan_memory.main()
        finally:
            sys.argv = before
        return code, json.loads(out.getvalue())

    return call


def planned(command, card, **values):
    """(peak in bytes, recipe's arguments) of a launch command on a card of so many bytes, read by the launcher, the
    recipe and the planner."""
    words = shlex.split(command)
    assert words[:2] == ["accelerate", "launch"]
    launch = LAUNCHER.parse_args(words[2:])
    assert (REPO / launch.config_file).is_file() and launch.training_script == "recipes/llama.py"
    args = recipe_arguments(launch.training_script_args)
    assert args.max_logits_mib is None
    vars(args).update({"max_logits_mib": pieces_on(card)} | values)
    config = plan_memory.read_config(None, REPO / launch.config_file)
    plan = plan_of(args, config, launch.num_processes, launch.num_machines, launch.mixed_precision)
    options = SimpleNamespace(longest=None, learnt_share=1.0)
    device = closed_form(
        plan, read_config(args.model_name_or_path), plan_memory.batch_of(args, options)
    )[0]
    return sum((device | constants_of(plan, device)).values()), args


BATCH = "--per_device_train_batch_size 32 --max_length 1024"
CALLS = {
    "one GPU": f"small --gpu 4GiB {BATCH}",
    "four GPUs": f"small --gpu 4GiB --num_gpus 4 --gradient_checkpointing {BATCH}",
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_listed_fits_as_its_command_is_planned(choose, call):
    code, report = choose(call)
    assert code == 0 and report["rows"]
    for row in report["rows"][::2]:
        peak, args = planned(row["command"], report["card"])
        assert peak == row["peak"] == sum(row["device"].values()) <= report["card"]
        assert args.gradient_checkpointing == row["gradient_checkpointing"]
        assert args.use_peft == (row["weights"] != "full") and row["reasons"]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_the_largest_batch_and_length_fit_and_larger_ones_do_not(choose, call):
    _, report = choose(call)
    for row in report["rows"][::3]:
        limits = {
            "per_device_train_batch_size": (
                row["largest_per_device_train_batch_size"],
                LINES_AT_MOST,
            ),
            "max_length": (row["largest_max_length"], SMALL.max_position_embeddings),
        }
        for name, (size, most) in limits.items():
            assert planned(row["command"], report["card"], **{name: size})[0] <= report["card"]
            assert (
                size == most
                or planned(row["command"], report["card"], **{name: size + 1})[0] > report["card"]
            )


def listed(flags, ranks, machines=None):
    """The rows of the small model on a card that holds all, in their order, without their limits."""
    options = SimpleNamespace(
        num_processes=ranks,
        num_machines=machines,
        mixed_precision=None,
        longest=None,
        learnt_share=1.0,
        words=flags,
    )
    args = recipe_arguments(flags)
    with memory_choice.models_built_once():
        return memory_choice.rows_of(
            memory_choice.launch_of(options, args, SMALL, 8 * GIB), args, ranks
        )


def test_the_cheaper_comes_first_and_offload_last():
    rows = listed([], 4)
    order = [(row.file, row.weights, row.plan.args.gradient_checkpointing) for row in rows]
    cheaper = [
        ("ddp.yaml", "LoRA", False),
        ("fsdp2_shard_grad_op.yaml", "LoRA", False),
        ("fsdp.yaml", "LoRA", False),
        ("ddp.yaml", "LoRA, nf4", False),
        ("ddp.yaml", "LoRA, nf4 dq", False),
        ("ddp.yaml", "LoRA", True),
        ("ddp.yaml", "full", False),
        ("fsdp.yaml", "full", False),
        ("ddp.yaml", "full", True),
    ]
    assert order[0] == cheaper[0] and [row for row in order if row in cheaper] == cheaper
    kept = [row for row in rows if "offload" not in row.file]
    assert kept == rows[: len(kept)] and [row.cost for row in kept] == sorted(
        row.cost for row in kept
    )
    assert all("on the host" in row.reasons[0] and row.host for row in rows[len(kept) :])


def test_int8_is_never_listed_with_fsdp_and_no_file_twice():
    rows = listed([], 4)
    int8 = {row.file for row in rows if "int8" in row.weights}
    assert "ddp.yaml" in int8 and not [file for file in int8 if "fsdp" in file]
    assert {"fsdp.yaml", "fsdp2_full_shard.yaml"} & {row.file for row in rows} == {"fsdp.yaml"}


GROUPS = [
    (1, None, set()),
    (3, None, set()),
    (4, None, {"fsdp2"}),
    (4, 2, {"fsdp1", "fsdp2"}),
    (4, 4, {"fsdp2"}),
]


@pytest.mark.parametrize("ranks, machines, versions", GROUPS)
def test_groups_are_listed_where_they_can_be_formed(ranks, machines, versions):
    files = {row.file for row in listed(["--gradient_checkpointing"], ranks, machines)}
    assert {file[:5] for file in files if "hybrid" in file} == versions
    assert ("single.yaml" in files) == (ranks == 1) != ("ddp.yaml" in files)


def test_what_the_user_gave_stays(choose):
    flags = "--use_peft --gradient_checkpointing --lora_r 4 --lora_target_modules q_proj v_proj --learning_rate 0.001"
    _, report = choose(
        f"small --gpu 6GiB --num_gpus 2 --mixed_precision fp16 --dataset_name rows.jsonl {flags}"
    )
    assert {row["weights"] for row in report["rows"]} == {
        "LoRA",
        "LoRA, int8",
        "LoRA, nf4",
        "LoRA, nf4 dq",
    }
    for row in report["rows"]:
        _, args = planned(row["command"], report["card"])
        assert args.gradient_checkpointing and args.use_peft and args.dtype == "float16"
        assert (args.lora_r, args.lora_target_modules, args.learning_rate) == (
            4,
            ["q_proj", "v_proj"],
            0.001,
        )
        assert (
            args.dataset_name == "rows.jsonl"
            and "--num_processes 2 --mixed_precision fp16" in row["command"]
        )


def test_nothing_fits_and_each_change_is_enough(choose):
    """A batch and rows that are too large by far, for GPUs that hold the weights."""
    code, report = choose(f"small --gpu 1GiB {BATCH} --use_peft --gradient_checkpointing")
    assert code == 1 and not report["rows"] and report["closest"]["peak"] > report["card"]
    kinds = [one["change"].split(":")[0] for one in report["changes"]]
    assert kinds == ["a smaller batch", "shorter rows", "another card"]
    for one in report["changes"]:
        named = one["change"].split()[2].rstrip(",")
        card = int(CARDS[named] * GIB) if "card" in one["change"] else report["card"]
        peak, args = planned(one["command"], card)
        assert peak == one["peak"] <= card
        if "batch" in one["change"]:
            assert args.per_device_train_batch_size * args.gradient_accumulation_steps == 32
        if "rows" in one["change"]:
            assert planned(one["command"], card, max_length=args.max_length + 1)[0] > card


def test_where_offload_alone_fits_more_gpus_are_proposed(choose):
    batch = "--per_device_train_batch_size 1 --max_length 32"
    code, report = choose(
        f"wide --gpu 2.3GiB {batch} --use_peft --load_in_4bit --gradient_checkpointing"
    )
    assert code == 0 and all("offload" in row["config_file"] for row in report["rows"])
    assert "offload" not in report["closest"]["config_file"]
    more = next(one for one in report["changes"] if "GPUs" in one["change"])
    ranks = int(more["change"].split()[-1])
    assert f"--num_processes {ranks}" in more["command"]
    assert planned(more["command"], report["card"])[0] <= report["card"]
    fewer = more["command"].replace(f"--num_processes {ranks}", f"--num_processes {ranks // 2}")
    assert ranks == 2 or planned(fewer, report["card"])[0] > report["card"]


def test_the_terminal_shows_a_table_and_the_launch(models, capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["plan_memory.py", str(models / "small"), "--gpu", "h200", "--num_gpus", "4"]
    )
    assert plan_memory.main() == 0
    told = capsys.readouterr().out
    assert max(map(len, told.replace(str(models), "").splitlines())) <= 120
    assert " more: --json -" in told and "LoRA, nf4 dq" in told and "full weights" in told
    launches = [
        part.replace("\\\n", " ")
        for part in told.split("\n\n")
        if part.startswith("accelerate launch")
    ]
    assert [planned(command, CARDS["h200"] * GIB)[1].use_peft for command in launches] == [
        True,
        False,
    ]


WRONG = {
    "small --gpu 24GB --num_gpus 0": "--num_processes 0",
    "small --gpu 24GB --max_length 0": "--max_length 0",
    "small --gpu 24GB --use_peft --load_in_4bit --load_in_8bit": "choose one",
    "small --gpu 24GB --simulate": "--config_file",
    "small --gpu 24GB --lora_target_modules w1 --use_peft": "no such layers",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_call_is_one_line(models, words, capsys, monkeypatch):
    name, *others = words.split()
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", str(models / name), *others])
    assert plan_memory.main() == 64
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and WRONG[words] in told[0]


@pytest.mark.parametrize("bend", [0.0, 1.0, 40.0])
@pytest.mark.parametrize("root", [3, 4, 700, 65_536])
def test_the_search_is_short(bend, root):
    """For a peak that is flat, then a line, then steeper, as that of attention with masks."""
    seen = []

    def peak(number):
        seen.append(number)
        return max(number, root // 2) + bend * number**2 / root

    assert largest(peak, peak(root), 2, peak(2), 2**17, 4) == root
    assert len(seen) <= 25


def test_every_file_and_engine_is_known():
    """A new YAML is tried, a link in place of the file that it leads to."""
    assert {path.name for path in memory_choice.config_files()} == {
        path.name
        for path in (REPO / "accelerate_configs").glob("*.yaml")
        if path.name != "fsdp2_full_shard.yaml"
    }
