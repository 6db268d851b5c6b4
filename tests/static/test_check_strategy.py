"""The recipe tells what accelerate runs from what the launcher was asked for, for every form that FSDP's keys take."""

from types import SimpleNamespace

import preflight
import pytest
import torch
from accelerate import DistributedType
from accelerate.utils import FullyShardedDataParallelPlugin
from whole_state import strategy_in_force

# What `accelerate launch` exports where the YAML is silent (accelerate 1.15, utils/launch.py)
LAUNCHER = {"ACCELERATE_USE_FSDP": "true", "WORLD_SIZE": "4", "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
            "FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_SYNC_MODULE_STATES": "false",
            "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}


def accelerator_of(monkeypatch, version, strategy, reshard, replicas=1, processes=4, gpus_per_host=2):
    """An Accelerator whose plugin is accelerate's own, made from the environment."""
    monkeypatch.setattr(torch.cpu, "device_count", lambda: gpus_per_host)
    changes = {"FSDP_VERSION": str(version), "FSDP_SHARDING_STRATEGY": strategy, "FSDP_RESHARD_AFTER_FORWARD": reshard}
    for name, value in (LAUNCHER | changes).items():
        monkeypatch.setenv(name, value)
    state = SimpleNamespace(fsdp_plugin=FullyShardedDataParallelPlugin(), backend="gloo")
    mesh = SimpleNamespace(dp_replicate_size=replicas) if replicas > 1 else None
    return SimpleNamespace(distributed_type=DistributedType.FSDP, state=state, parallelism_config=mesh,
                           num_processes=processes, device=SimpleNamespace(type="cpu"))


def problems(monkeypatch, *strategy, **setting):
    """check_strategy's answer for such an Accelerator."""
    accelerator = accelerator_of(monkeypatch, *strategy, **setting)
    found = preflight.check_strategy(accelerator, strategy_in_force(accelerator))
    return [problem for broken, problem in found if broken]


@pytest.mark.parametrize(("version", "strategy", "reshard", "replicas"), [
    *((1, strategy, "true", 1) for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD")),
    (1, "FULL_SHARD", "full_shard", 1),  # as `accelerate config` writes it
    (1, "NO_SHARD", "no_shard", 1),
    (2, "FULL_SHARD", "true", 1), (2, "FULL_SHARD", "false", 1), (2, "SHARD_GRAD_OP", "false", 1), (2, "1", "true", 1),
    (2, "FULL_SHARD", "true", 2), (2, "HYBRID_SHARD", "true", 2), (2, "FULL_SHARD", "false", 2),
])
def test_what_is_run_as_asked_is_accepted(version, strategy, reshard, replicas, monkeypatch):
    assert problems(monkeypatch, version, strategy, reshard, replicas) == []


@pytest.mark.parametrize(("version", "strategy", "reshard", "runs"), [
    (1, "FULL_SHARD", "no_shard", "FSDP1 FULL_SHARD"), (1, "FULL_SHARD", "shard_grad_op", "FSDP1 FULL_SHARD"),
    (1, "FULL_SHARD", "false", "FSDP1 FULL_SHARD"),
    (2, "NO_SHARD", "true", "FSDP2 FULL_SHARD"), (2, "SHARD_GRAD_OP", "true", "FSDP2 FULL_SHARD"),
    (2, "HYBRID_SHARD", "true", "FSDP2 FULL_SHARD"),
])
def test_what_has_no_effect_is_refused(version, strategy, reshard, runs, monkeypatch):
    found = problems(monkeypatch, version, strategy, reshard)
    assert len(found) == 1 and f"has no effect, accelerate runs {runs}" in found[0] and "check_config.py" in found[0]


def test_fewer_processes_than_asked_for_are_refused(monkeypatch):
    assert "asked for more" in problems(monkeypatch, 2, "FULL_SHARD", "true", processes=1)[0]


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_fsdp1_over_one_rank_is_told_as_the_no_shard_that_torch_makes_of_it(strategy, monkeypatch):
    accelerator = accelerator_of(monkeypatch, 1, strategy, "true", processes=1, gpus_per_host=1)
    assert strategy_in_force(accelerator)[0] == "FSDP1 NO_SHARD"


def test_a_hybrid_of_hosts_with_one_gpu_each_is_refused(monkeypatch):
    found = problems(monkeypatch, 1, "HYBRID_SHARD", "true", processes=4, gpus_per_host=1)
    assert len(found) == 1 and "neither shard nor average" in found[0]
