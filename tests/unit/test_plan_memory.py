"""scripts/plan_memory.py: every YAML, what the closed form counts and refuses, wrong calls."""

import json
import sys

import pytest

import plan_memory
from components.config_files import load
from components.config_reading import as_read
from launching import REPO
from memory_plan import Batch, Plan, closed_form, plan_of
from memory_trace import simulate
from model_shapes import Unplannable
from validate_planner import BASE, config_of, recipe_arguments

WRAP = "TRANSFORMER_BASED_WRAP"
SMALL = BASE | {"width": 128, "depth": 2, "vocab": 1000}
YAMLS = {  # engine, stage, shards, reshards, what is offloaded of parameters and optimizer; on 4 ranks of 2 machines
    "single": ("single", 0, 1, True, False, False),
    "ddp": ("ddp", 0, 4, True, False, False),
    "fsdp": ("fsdp2", 0, 4, True, False, False),
    "fsdp2_full_shard": ("fsdp2", 0, 4, True, False, False),
    "fsdp2_shard_grad_op": ("fsdp2", 0, 4, False, False, False),
    "fsdp2_hybrid_shard": ("fsdp2", 0, 2, True, False, False),
    "fsdp2_cpu_offload": ("fsdp2", 0, 4, True, True, True),
    "fsdp1_full_shard": ("fsdp1", 0, 4, True, False, False),
    "fsdp1_hybrid_shard": ("fsdp1", 0, 2, True, False, False),
    "fsdp1_shard_grad_op": ("fsdp1", 0, 4, False, False, False),
    "fsdp1_no_shard": ("fsdp1", 0, 1, False, False, False),
    "deepspeed_zero0": ("zero", 0, 4, True, False, False),
    "deepspeed_zero1": ("zero", 1, 4, True, False, False),
    "deepspeed_zero2": ("zero", 2, 4, True, False, False),
    "deepspeed_zero2_offload": ("zero", 2, 4, True, False, True),
    "deepspeed_zero3": ("zero", 3, 4, True, False, False),
    "deepspeed_zero3_offload": ("zero", 3, 4, True, True, True),
}


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (REPO / "accelerate_configs").glob("*.yaml"))
)
def test_a_yaml_is_planned_as_what_it_runs(name):
    config = as_read(load(REPO / "accelerate_configs" / f"{name}.yaml").content)
    plan = plan_of(
        recipe_arguments([]), config, 1 if name == "single" else 4, 1 if name == "single" else 2
    )
    found = (
        plan.engine,
        plan.stage,
        plan.shards,
        plan.reshards,
        plan.offloads_parameters,
        plan.offloads_optimizer,
    )
    assert found == YAMLS[name] and plan.mixed_precision == "bf16"


REFUSED = {
    "nowhere.json --config_file {ddp}": "no such file",
    "{model} --config_file {ddp} --num_processes 0": "--num_processes 0",
    "{model} --config_file {ddp} --gpu sheep": "neither a size",
    "{model} --config_file {single} --num_processes 2": "one process",
    "{model} --config_file {fsdp2_hybrid_shard} --num_processes 8": "mesh",
    "{model} --config_file {fsdp} --load_in_8bit --use_peft": "int8",
    "{model} --config_file {ddp} --max_lenght 3": "did you mean --max_length?",
    "{model} --config_file {ddp} --learnt_share 2": "--learnt_share 2",
    "{model} --config_file {ddp} --longest 0": "--longest 0",
    "{model} --config_file {ddp} --longest 5 --packing": "--longest",
    "{model} --config_file {fsdp1_hybrid_shard} --num_processes 4 --num_machines -2": "-2 machines",
    "{model} --config_file {fsdp2_cpu_offload} --num_processes 2 --simulate": "offload",
    "{model} --config_file {single} --optim adamw_8bit --simulate": "adamw_8bit",
    "{model} --config_file nowhere.yaml": "nowhere.yaml",
    "{model}": "--gpu",
    "{model} --config_file {ddp} --use_peft --use_dora": "add --simulate",
    "{model} --config_file {ddp} --lora_target_modules w1 --use_peft": "no such layers",
    "{model} --config_file {deepspeed_zero2} --simulate": "--simulate",
    "{unknown} --config_file {ddp}": "no field model_type",
    "{strange} --config_file {ddp}": "not the config of a model",
    "{wide} --config_file {ddp}": "not the config of a model",
    "{picture} --config_file {ddp}": "no causal language model from this config",
    "--config_file {ddp} --max_length 5 {model}": "before the recipe's own arguments",
    "{impossible} --config_file {ddp}": "no causal language model from this config",
    "recipes/bert.py --config_file {ddp}": "recipes/llama.py",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_wrong_call_is_one_line(words, tmp_path, capsys, monkeypatch):
    configs = {path.stem: path for path in (REPO / "accelerate_configs").glob("*.yaml")}
    config_of(SMALL).save_pretrained(tmp_path / "model")
    contents = {"unknown": {"hidden_size": 8}, "strange": {"model_type": "no such"}}
    contents |= {
        "wide": {"model_type": "llama", "hidden_size": "wide"},
        "picture": {"model_type": "vit"},
    }
    contents["impossible"] = {"model_type": "llama", "vocab_size": -5}
    for name, content in contents.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    places = {name: tmp_path / name for name in ("model", *contents)} | configs
    monkeypatch.setattr(sys, "argv", ["plan_memory.py", *words.format(**places).split()])
    try:
        code = plan_memory.main()
    except SystemExit as error:
        code = error.code
    told = capsys.readouterr().err.strip()
    assert (
        code == 64
        and REFUSED[words] in told
        and "Traceback" not in told
        and len(told.splitlines()) <= 2
    )


def test_evaluation_with_larger_batches_is_planned(tmp_path):
    plan = plan_of(
        recipe_arguments(["--per_device_eval_batch_size", "64"]), {"distributed_type": "NO"}, 1
    )
    plan.args.eval_strategy = "epoch"
    with_evaluation = sum(closed_form(plan, config_of(SMALL), Batch(1, 512, 512))[0].values())
    plan.args.eval_strategy = "no"
    assert with_evaluation > 2 * sum(
        closed_form(plan, config_of(SMALL), Batch(1, 512, 512))[0].values()
    )


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_rows_longer_than_a_window_get_masks(family):
    config = config_of(SMALL | {"family": family})
    config.sliding_window, config.use_sliding_window = 128, True
    if getattr(config, "layer_types", None):
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    plan, batch = Plan(recipe_arguments([])), Batch(1, 512, 512)
    traced = sum(simulate(plan, config, batch).values())
    assert sum(closed_form(plan, config, batch)[0].values()) == pytest.approx(traced, rel=0.02)


UNPLANNED = {
    "fsdp_activation_checkpointing": {"fsdp_activation_checkpointing": True},
    "fsdp_transformer_layer_cls_to_wrap": {"fsdp_transformer_layer_cls_to_wrap": "LlamaMLP"},
    "fsdp_use_orig_params": {"fsdp_use_orig_params": False},
}


@pytest.mark.parametrize("key", UNPLANNED)
def test_keys_that_change_memory_are_not_passed_over(key):
    content = {
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_version": 1, "fsdp_auto_wrap_policy": WRAP} | UNPLANNED[key],
    }
    with pytest.raises(Unplannable, match=key):
        plan_of(recipe_arguments([]), as_read(content), 4)
