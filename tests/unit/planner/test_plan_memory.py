# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py: what is refused, in one line and with which exit code."""

import json
import sys

import pytest

import plan_memory
from launching import CONFIGS
from planner.request import Request, batch_of, read_arguments
from planner_jobs import BASE, config_of, mixture_of

SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}
CONFIG_FILES = {path.stem: path for path in CONFIGS.glob("*.yaml")}
BAD_MODELS = {
    "unknown": {"hidden_size": 8},
    "strange": {"model_type": "no such"},
    "wide": {"model_type": "llama", "hidden_size": "wide"},
    "picture": {"model_type": "vit"},
    "impossible": {"model_type": "llama", "vocab_size": -5},
}
MIXTRAL = "recipes/mixtral.py --model_name_or_path {mixture}"
DENSE = "recipes/mixtral.py --model_name_or_path {model}"
PIPELINE = "recipes/llama_pipeline.py --model_name_or_path {model}"
REFUSED = {
    "nowhere.json --config_file {ddp}": "no such file",
    "{model} --config_file {ddp} --num_processes 0": "--num_processes 0",
    "{model} --config_file {ddp} --gpu sheep": "neither a size",
    "{model} --config_file {single} --num_processes 2": "one process",
    "{model} --config_file {fsdp2_hybrid_shard} --num_processes 8": "needs 4 processes, not 8",
    "{model} --config_file {fsdp} --load_in_8bit --use_peft": "int8",
    "{model} --config_file {ddp} --max_lenght 3": "did you mean --max_length?",
    "{model} --config_file {ddp} --longest 0": "--longest 0",
    "{model} --config_file {ddp} --longest 5 --packing": "--longest",
    "{model} --config_file {fsdp1_hybrid_shard} --num_processes 4 --num_machines -2": "-2 machines",
    "{model} --config_file nowhere.yaml": "nowhere.yaml",
    "{model}": "--gpu",
    "{model} --gpu 24GB --num_gpus 0": "--num_processes 0",
    "{model} --gpu 24GB --use_peft --load_in_4bit --load_in_8bit": "choose",
    "{model} --gpu 24GB --use_peft --lora_target_modules w1": "none of this name",
    "{model} --config_file {ddp} --modules_to_save lm_head": "add --use_peft",
    "{model} --config_file {ddp} --use_peft --modules_to_save lm_haed": "none of this name",
    "{tied} --config_file {ddp} --use_peft --modules_to_save lm_head": "share their numbers",
    "{model} --config_file {ddp} --lora_target_modules w1 --use_peft": "none of this name",
    "{model} --config_file {tp} --parallelism_config_tp_size 3": "rehearse it",
    "{model} --config_file {tp} --parallelism_config_tp_size 0": "must be at least 1",
    "{mixture} --config_file {ep} --num_processes 2 --ep_size 2": "rehearse it",
    f"--config_file {{fsdp2_cp}} {MIXTRAL}": "rehearse it",
    f"--config_file {{ddp}} {DENSE}": "num_experts_per_tok",
    "{unknown} --config_file {ddp}": "no config that transformers can read",
    "{strange} --config_file {ddp}": "no config that transformers can read",
    "{wide} --config_file {ddp}": "no config that transformers can read",
    "{picture} --config_file {ddp}": "ViTConfig",
    "--config_file {ddp} --max_length 5 {model}": "--max_length",
    "{impossible} --config_file {ddp}": "-5",
    "recipes/bert.py --config_file {ddp}": "rehearse it",
    f"--config_file {{pp}} --num_processes 2 {PIPELINE}": "rehearse it",
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """{name: path} of a model that can be planned, of bad ones, and of the YAMLs."""
    folder = tmp_path_factory.mktemp("models")
    config_of(SMALL).save_pretrained(folder / "model")
    config_of(SMALL | {"tied": True}).save_pretrained(folder / "tied")
    mixture_of(SMALL).save_pretrained(folder / "mixture")
    places = CONFIG_FILES | {"mixture": folder / "mixture"}
    places |= {"model": folder / "model", "tied": folder / "tied"}
    for name, content in BAD_MODELS.items():
        places[name] = folder / name
        places[name].mkdir()
        (places[name] / "config.json").write_text(json.dumps(content))
    return places


def exit_code(words, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *words])
    try:
        return plan_memory.main()
    except SystemExit as error:  # raised by a parser
        return error.code


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_one_line(words, places, capsys, monkeypatch):
    assert exit_code(words.format(**places).split(), monkeypatch) == 64
    message = capsys.readouterr().err.strip()
    assert REFUSED[words] in message
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 2


def test_a_plan_that_cannot_be_written_is_one_line(places, tmp_path, capsys, monkeypatch):
    words = f"{places['model']} --config_file {places['single']} --max_length 8"
    missing = tmp_path / "missing" / "plan.json"
    assert exit_code([*words.split(), "--json", str(missing)], monkeypatch) == 73
    assert f"cannot write {missing}" in capsys.readouterr().err


def test_a_wrong_argument_leaves_no_trace_in_the_output_folder(places, tmp_path, monkeypatch):
    """The recipe records a refused launch there; a plan is no launch."""
    words = f"{places['model']} --config_file {places['single']} --output_dir {tmp_path} --wrong"
    assert exit_code(words.split(), monkeypatch) == 64
    assert not list(tmp_path.iterdir())


def test_what_only_the_launcher_reads_is_left_out(monkeypatch):
    words = "--multi_gpu --main_process_port 0 --machine_rank 1 recipes/llama.py --max_length 8"
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *words.split()])
    request = plan_memory.parse_args()
    assert (request["model"], request["words"]) == ("recipes/llama.py", ["--max_length", "8"])


def test_arguments_of_a_config_count_as_given(places, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("dtype: bfloat16\nmax_length: 64\nuse_peft: true\n")
    words = ["--config", str(config), "--lora_r", "4"]
    request = Request(model=str(places["model"]), words=words, gpu="24GB")
    _, args, request = read_arguments(request)
    assert (args.dtype, args.max_length, args.lora_r) == ("bfloat16", 64, 4)
    assert request.given == {"dtype", "max_length", "use_peft", "lora_r", "model_name_or_path"}


def test_a_mixture_is_planned_for_the_recipe_with_its_router_loss(places):
    """Without a recipe in the call; --ep_size is an argument of that one only."""
    request = Request(model=str(places["mixture"]), words=["--ep_size", "2"], gpu="24GB")
    recipe, args, _ = read_arguments(request)
    assert recipe.__name__ == "mixtral" and args.ep_size == 2
    recipe, *_ = read_arguments(Request(model=str(places["model"]), gpu="24GB"))
    assert recipe.__name__ == "llama"


def test_the_plan_of_a_dry_run_with_packing_is_accepted(places):
    words = ["--packing", "--max_length", "64"]
    request = Request(model=str(places["model"]), words=words, gpu="24GB", longest=64)
    _, args, request = read_arguments(request)
    assert batch_of(args, request).length == 64
