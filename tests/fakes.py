# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for what a launch would make."""

from types import SimpleNamespace

import torch
from accelerate import DistributedType


def fake_accelerator(**settings):
    """What recipes ask an Accelerator for: one process on a CPU without mixed precision, unless
    settings differ."""
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    plain = {
        "distributed_type": DistributedType.NO,
        "num_processes": 1,
        "process_index": 0,
        "parallelism_config": None,
        "is_main_process": True,
        "is_local_main_process": True,
        "is_fsdp2": False,
        "mixed_precision": "no",
        "native_amp": False,
        "device": torch.device("cpu"),
        "state": state,
    }
    return SimpleNamespace(**plain | settings)


def small_llama(**changes):
    """The config of a Llama of two layers."""
    from transformers import LlamaConfig

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaConfig(**sizes | {"num_attention_heads": 2} | changes)


def mixture_of_two():
    """The config of a Mixtral of one layer with two experts."""
    from transformers import MixtralConfig

    return MixtralConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )


def parallelism(**sizes):
    """The sizes of accelerate's mesh, each one that is not given 1."""
    names = ("dp_replicate", "dp_shard", "cp", "sp", "tp")
    return SimpleNamespace(**{f"{name}_size": sizes.get(name, 1) for name in names})


def under(engine, ranks=2, deepspeed_config=None, **settings):
    """What accelerate says of itself under an engine, such as "FSDP1 FULL_SHARD" or "ZeRO-2"."""
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None, backend="gloo")
    kind = DistributedType.NO
    if engine.startswith("FSDP"):
        kind = DistributedType.FSDP
        state.fsdp_plugin = SimpleNamespace(
            fsdp_version=int(engine[4]),
            sharding_strategy=SimpleNamespace(name=engine[6:]),
            reshard_after_forward=engine.endswith("FULL_SHARD"),
            cpu_ram_efficient_loading=False,
            use_orig_params=True,
            cpu_offload=settings.pop("cpu_offload", None),
        )
    if engine.startswith("ZeRO"):
        kind = DistributedType.DEEPSPEED
        state.deepspeed_plugin = SimpleNamespace(
            zero_stage=int(engine[5]), deepspeed_config=deepspeed_config or {}
        )
    return fake_accelerator(state=state, distributed_type=kind, num_processes=ranks, **settings)


def rows_of_their_own(ranks=1, rank=0):
    """The layout of one of the ranks that each have other rows."""
    from core.engine import Layout

    return Layout(fake_accelerator(num_processes=ranks, process_index=rank))
