# SPDX-License-Identifier: Apache-2.0
"""A strategy that accelerate replaces is detected, for every form that FSDP's keys take."""

import sys
from types import SimpleNamespace

import psutil
import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin

from components import launch_command
from components.cli import parse_arguments
from components.strategy import Strategy
from components.strategy_checks import (
    find_dropped_settings,
    find_misfits,
    find_missing_device,
    find_problems_of_environment,
    how_to_rehearse,
)
from example_arguments import MixtureArguments, language_model_arguments
from fakes import fake_accelerator, parallelism

# What `accelerate launch` exports where the YAML is silent (accelerate 1.15, utils/launch.py)
LAUNCHER = {
    "ACCELERATE_USE_FSDP": "true",
    "WORLD_SIZE": "4",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_SYNC_MODULE_STATES": "false",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
}
ONE_PROCESS = Strategy("one process")
DDP = Strategy("DDP")
FSDP1 = Strategy("FSDP1 FULL_SHARD", fsdp_version=1)
FSDP1_NO_SHARD = Strategy("FSDP1 NO_SHARD", fsdp_version=1)
FSDP2 = Strategy("FSDP2 FULL_SHARD", fsdp_version=2)
ZERO2 = Strategy("DeepSpeed ZeRO-2", zero_stage=2)
ZERO3 = Strategy("DeepSpeed ZeRO-3", zero_stage=3)


def accelerator_of(
    monkeypatch, version, strategy, reshard, replicas=1, processes=4, gpus_per_host=2
):
    """An Accelerator whose plugin is accelerate's own, made from the environment."""
    monkeypatch.setattr(torch.cpu, "device_count", lambda: gpus_per_host)
    changes = {
        "FSDP_VERSION": str(version),
        "FSDP_SHARDING_STRATEGY": strategy,
        "FSDP_RESHARD_AFTER_FORWARD": reshard,
    }
    for name, value in (LAUNCHER | changes).items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(
        fsdp_plugin=FullyShardedDataParallelPlugin(), deepspeed_plugin=None, backend="gloo"
    )
    mesh = parallelism(dp_replicate=replicas) if replicas > 1 else None
    return fake_accelerator(
        distributed_type=DistributedType.FSDP,
        state=state,
        parallelism_config=mesh,
        num_processes=processes,
    )


def dropped(monkeypatch, *strategy, **setting):
    """What find_dropped_settings says of such an Accelerator."""
    accelerator = accelerator_of(monkeypatch, *strategy, **setting)
    return list(find_dropped_settings(accelerator, Strategy.of(accelerator)))


@pytest.mark.parametrize(
    ("version", "strategy", "reshard", "replicas"),
    [
        *(
            (1, strategy, "true", 1)
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")
        ),
        (1, "FULL_SHARD", "full_shard", 1),  # as `accelerate config` writes it
        (1, "NO_SHARD", "no_shard", 1),
        (2, "FULL_SHARD", "true", 1),
        (2, "FULL_SHARD", "false", 1),
        (2, "SHARD_GRAD_OP", "false", 1),
        (2, "1", "true", 1),
        (2, "2", "false", 1),  # SHARD_GRAD_OP by its number
        (2, "4", "true", 2),  # HYBRID_SHARD
        (2, "FULL_SHARD", "true", 2),
        (2, "HYBRID_SHARD", "true", 2),
        (2, "FULL_SHARD", "false", 2),
    ],
)
def test_what_is_run_as_asked_is_accepted(version, strategy, reshard, replicas, monkeypatch):
    assert dropped(monkeypatch, version, strategy, reshard, replicas) == []


@pytest.mark.parametrize(("requested", "refused"), [("SHARD_GRAD_OP", 0), ("NO_SHARD", 1)])
def test_a_mesh_in_the_name_of_a_strategy_does_not_hide_how_it_shards(
    requested, refused, monkeypatch
):
    accelerator = accelerator_of(monkeypatch, 2, requested, "false")
    accelerator.parallelism_config = parallelism(tp=2)
    found = list(find_dropped_settings(accelerator, Strategy.of(accelerator)))
    assert len(found) == refused
    assert all("accelerate runs FSDP2 SHARD_GRAD_OP x TP 2" in problem for problem in found)


@pytest.mark.parametrize(
    ("version", "strategy", "reshard", "runs"),
    [
        (1, "FULL_SHARD", "no_shard", "FSDP1 FULL_SHARD"),
        (1, "FULL_SHARD", "shard_grad_op", "FSDP1 FULL_SHARD"),
        (1, "FULL_SHARD", "false", "FSDP1 FULL_SHARD"),
        (2, "NO_SHARD", "true", "FSDP2 FULL_SHARD"),
        (2, "3", "true", "FSDP2 FULL_SHARD"),
        (2, "2", "true", "FSDP2 FULL_SHARD"),
        (2, "SHARD_GRAD_OP", "true", "FSDP2 FULL_SHARD"),
        (2, "HYBRID_SHARD", "true", "FSDP2 FULL_SHARD"),
    ],
)
def test_what_has_no_effect_is_refused(version, strategy, reshard, runs, monkeypatch):
    found = dropped(monkeypatch, version, strategy, reshard)
    assert (
        len(found) == 1
        and f"has no effect, accelerate runs {runs}" in found[0]
        and "check_config.py" in found[0]
    )


@pytest.mark.parametrize(
    ("strategy", "config", "says"),
    [
        (
            ZERO2,
            {"gradient_accumulation_steps": 4},
            "command line owns gradient_accumulation_steps",
        ),
        (ZERO2, {"gradient_clipping": 1.0}, "command line owns gradient_clipping"),
        (ZERO2, {"tensor_parallel": {"autotp_size": 2}}, "and use fsdp2_tp.yaml"),
        (FSDP1, None, "trains nothing"),
    ],
)
def test_what_a_config_file_would_be_refused_for_is_refused_without_one_too(strategy, config, says):
    # Under torchrun, with what accelerate reads from the environment, there is no file to check
    zero = None if config is None else SimpleNamespace(deepspeed_config=config)
    plugins = SimpleNamespace(
        deepspeed_plugin=zero, fsdp_plugin=SimpleNamespace(use_orig_params=False)
    )
    accelerator = fake_accelerator(state=plugins)
    (problem,) = find_misfits(language_model_arguments(), accelerator, strategy)
    assert says in problem


def test_fewer_processes_than_asked_for_are_refused(monkeypatch):
    found = dropped(monkeypatch, 2, "FULL_SHARD", "true", processes=1)
    assert "requested more" in found[0]
    assert "since no GPU was found; without GPUs, rehearse: python scripts/rehearse.py" in found[0]


def test_a_launcher_that_started_one_of_several_processes_is_found_by_the_address(monkeypatch):
    def problems(command, **before):
        launcher = SimpleNamespace(cmdline=lambda: command, environ=lambda: before)
        monkeypatch.setattr(psutil.Process, "parents", lambda self: [launcher])
        return list(find_dropped_settings(fake_accelerator(), ONE_PROCESS))

    monkeypatch.setattr(launch_command, "find_launch", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    console_script = ["python", "/env/bin/accelerate", "launch", "train.py"]
    module = ["python", "-m", "accelerate.commands.launch", "train.py"]
    for command in (console_script, module):
        assert "requested more" in problems(command)[0]
        assert problems(command, MASTER_ADDR="127.0.0.1") == []  # the cluster exports it
    assert problems(["bash"]) == []


def test_the_way_out_names_the_files_of_this_launch(monkeypatch):
    launch = SimpleNamespace(config_file="my configs/fsdp.yaml")
    monkeypatch.setattr(launch_command, "find_launch", lambda: launch)
    monkeypatch.setattr(sys, "argv", ["recipes/llama.py"])
    (problem,) = dropped(monkeypatch, 1, "FULL_SHARD", "no_shard")
    assert problem.endswith("python scripts/check_config.py 'my configs/fsdp.yaml'")
    assert how_to_rehearse().endswith("--config_file 'my configs/fsdp.yaml' recipes/llama.py ...")


def test_where_the_files_are_not_known_it_says_what_to_put_there(monkeypatch):
    def unreadable():
        raise ValueError("the launcher's command line cannot be read")

    for find_launch in (lambda: None, unreadable):
        monkeypatch.setattr(launch_command, "find_launch", find_launch)
        assert "--config_file YAML recipes/RECIPE.py ..." in how_to_rehearse()


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_fsdp1_over_one_rank_is_told_as_the_no_shard_that_torch_makes_of_it(strategy, monkeypatch):
    accelerator = accelerator_of(monkeypatch, 1, strategy, "true", processes=1, gpus_per_host=1)
    assert Strategy.of(accelerator).name == "FSDP1 NO_SHARD"


def test_a_hybrid_of_hosts_with_one_gpu_each_is_refused(monkeypatch):
    found = dropped(monkeypatch, 1, "HYBRID_SHARD", "true", processes=4, gpus_per_host=1)
    assert len(found) == 1 and "neither shard nor average" in found[0]


@pytest.mark.parametrize(
    ("flags", "strategy", "precision", "says"),
    [
        (["--load_in_8bit"], FSDP2, "no", "cannot shard int8 weights"),
        (["--load_in_8bit"], DDP, "no", None),
        (["--load_in_4bit"], FSDP2, "bf16", "cast, and so destroy, 4-bit weights"),
        (["--load_in_4bit", "--dtype", "bf16"], FSDP2, "bf16", None),
        (["--load_in_4bit"], DDP, "bf16", None),
        (
            ["--load_in_4bit"],
            Strategy("FSDP1 SHARD_GRAD_OP", fsdp_version=1),
            "no",
            "cannot hold a 4-bit base: use fsdp2_shard_grad_op.yaml",
        ),
        (["--use_peft", "--use_dora"], FSDP1, "no", "use an fsdp2 YAML, or leave out --use_dora"),
        (["--use_peft", "--use_dora"], FSDP2, "no", None),
        (["--use_peft"], FSDP1_NO_SHARD, "no", "use single.yaml, which holds the same"),
        ([], FSDP1_NO_SHARD, "no", None),
        (["--optim", "adamw_8bit"], FSDP2, "no", "cannot hold the shards of FSDP2 FULL_SHARD"),
        (["--optim", "adamw_8bit"], DDP, "no", None),
        (["--torch_compile"], FSDP1, "no", "cannot compile the layers of FSDP1 FULL_SHARD"),
        (["--torch_compile"], FSDP2, "no", None),
        (["--dtype", "bf16"], FSDP2, "no", "keeps no fp32 copy of the weights"),
        (["--dtype", "bf16"], FSDP2, "bf16", None),
        (["--dtype", "bf16", "--no_master_weights"], FSDP2, "bf16", "changes nothing (FSDP2"),
    ],
)
def test_what_does_not_fit_a_strategy_is_refused(flags, strategy, precision, says):
    plugins = SimpleNamespace(
        deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(use_orig_params=True)
    )
    accelerator = fake_accelerator(state=plugins, mixed_precision=precision)
    found = list(find_misfits(language_model_arguments(*flags), accelerator, strategy))
    if says is None:
        assert found == []
    else:
        assert len(found) == 1 and says in found[0]


@pytest.mark.parametrize(
    ("flags", "strategy", "refused"),
    [
        (["--use_peft"], FSDP1, True),
        (["--use_peft"], FSDP2, False),
        (["--use_peft", "--lora_target_parameters"], FSDP1, False),
        ([], FSDP1, False),
    ],
)
def test_adapters_of_experts_are_refused_under_fsdp1(flags, strategy, refused):
    plugins = SimpleNamespace(
        deepspeed_plugin=None, fsdp_plugin=SimpleNamespace(use_orig_params=True)
    )
    args = parse_arguments(MixtureArguments, words=flags)
    found = list(find_misfits(args, fake_accelerator(state=plugins), strategy))
    assert len(found) == refused and all("those of experts are not" in line for line in found)


def test_compiling_has_one_owner(monkeypatch):
    args = language_model_arguments("--torch_compile")
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    (problem,) = find_problems_of_environment(args, DDP)
    assert "the command line owns it" in problem
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "NO")
    assert list(find_problems_of_environment(args, DDP)) == []


@pytest.mark.parametrize(
    ("mesh", "strategy", "refused"),
    [("DP_SHARD", DDP, True), ("DP_SHARD", FSDP2, False)],
)
def test_meshes_that_nothing_would_shard_over_are_refused(mesh, strategy, refused, monkeypatch):
    monkeypatch.setenv(f"PARALLELISM_CONFIG_{mesh}_SIZE", "2")
    found = list(find_problems_of_environment(language_model_arguments(), strategy))
    assert len(found) == refused and all("does not shard by a mesh" in line for line in found)


def test_offload_without_a_compiler_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = find_problems_of_environment(language_model_arguments(), ZERO2)
    assert "pip install ninja" in problem and "g++" in problem
    for name in ("ninja", "c++"):
        (tmp_path / name).touch(mode=0o755)
    assert list(find_problems_of_environment(language_model_arguments(), ZERO2)) == []


@pytest.mark.parametrize(
    ("environment", "has_gpu", "problems"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, False, 1),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, True, 0),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_TORCH_DEVICE": "cpu"}, False, 0),
        ({}, False, 0),
    ],
    ids=["no GPU", "a GPU", "a rehearsal", "no DeepSpeed"],
)
def test_deepspeed_without_a_gpu_is_named_before_it_compiles(
    environment, has_gpu, problems, monkeypatch
):
    for name in ("ACCELERATE_USE_DEEPSPEED", "ACCELERATE_TORCH_DEVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: has_gpu)
    found = list(find_missing_device())
    assert len(found) == problems
    assert all("rehearse: python scripts/rehearse.py" in problem for problem in found)
