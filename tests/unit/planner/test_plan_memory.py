# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py: what is refused, in one line and with which exit code."""

import pytest

import plan_memory
from launching import CONFIGS
from planner.plan import Request, read_arguments
from planner_jobs import BASE, config_of, mixture_of

SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}
CONFIG_FILES = {path.stem: path for path in CONFIGS.glob("*.yaml")}
MIXTRAL = "recipes/mixtral.py --model_name_or_path {mixture}"
DENSE = "recipes/mixtral.py --model_name_or_path {model}"
PIPELINE = "recipes/llama_pipeline.py --model_name_or_path {model}"
REFUSED = {
    "{nowhere} --config_file {ddp}": "no model: ",
    "{model} --config_file {ddp} --gpu sheep": "neither a size",
    "{model} --config_file {fsdp} --load_in_8bit --use_peft": "int8",
    "{model} --config_file {ddp} --max_lenght 3": "did you mean --max_length?",
    "{model}": "--gpu",
    "{tied} --config_file {ddp} --use_peft --modules_to_save lm_head": "share their numbers",
    "--parallelism_config_tp_size 3 {model} --config_file {tp}": "rehearse it",
    f"--config_file {{ep}} --num_processes 2 {MIXTRAL} --ep_size 2": "rehearse it",
    f"--config_file {{fsdp2_cp}} {MIXTRAL}": "rehearse it",
    f"--config_file {{ddp}} {DENSE}": "num_experts_per_tok",
    "{unknown} --config_file {ddp}": "no model: ",
    "--config_file {ddp} --max_length 5 {model}": "--max_length",
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
    places["nowhere"] = folder / "nowhere.json"
    places["unknown"] = folder / "unknown"
    places["unknown"].mkdir()
    (places["unknown"] / "config.json").write_text('{"hidden_size": 8}')
    return places


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_one_line(words, places, in_process):
    done = in_process(plan_memory, *words.format(**places).split())
    message = done.err.strip()
    assert done.code == 64 and REFUSED[words] in message
    assert "Traceback" not in message
    assert len(message.splitlines()) <= 2


def test_arguments_of_a_config_count_as_given(places, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text("dtype: bfloat16\nmax_length: 64\nuse_peft: true\n")
    words = ["--config", str(config), "--lora_r", "4"]
    request = Request(model=str(places["model"]), words=words, gpu="24GB")
    args, request = read_arguments(request)
    assert (args.dtype, args.max_length, args.lora_r) == ("bfloat16", 64, 4)
    assert request.given == {"dtype", "max_length", "use_peft", "lora_r", "model_name_or_path"}
