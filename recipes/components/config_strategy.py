# SPDX-License-Identifier: Apache-2.0
"""The strategy that a config requests: engine, sharding, mesh, offload and number of shards."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

# The sharding key that each version of FSDP reads; it ignores the other one
SHARDING_KEY = {1: "fsdp_sharding_strategy", 2: "fsdp_reshard_after_forward"}
OTHER_VERSION = {1: 2, 2: 1}  # {version of FSDP: the other one}
# The lowest ZeRO stage that offloads each of these
OFFLOADED_FROM_STAGE = {"offload_optimizer": 1, "offload_param": 3}
SHARING_KINDS = ("tp", "cp", "sp")  # sizes of a mesh whose processes share rows
MESH_KINDS = ("dp_replicate", "dp_shard", *SHARING_KINDS)
# {engine: the sizes of a mesh by which it splits something}
SPLITS_BY: dict[str, tuple[str, ...]] = {
    "single": (),
    "ddp": ("dp_replicate", "tp"),
    "fsdp1": (),
    "fsdp2": ("dp_replicate", "dp_shard", "tp", "cp"),
    "zero": ("dp_replicate", "dp_shard", "sp"),
}
# FSDP1's names for FSDP2's strategies on a mesh with replicas
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
# The lowest ZeRO stage that splits each kind of state
SPLIT_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1, "master": 1}
ZERO_STRATEGIES = ("NO_SHARD", "ZeRO-1", "ZeRO-2", "FULL_SHARD")

Engine = Literal["single", "ddp", "fsdp1", "fsdp2", "zero"]


@dataclass(frozen=True)
class ConfigStrategy:
    """The strategy that an accelerate config requests.

    Attributes:
        engine: single, ddp, fsdp1, fsdp2 or zero.
        strategy: the sharding strategy of FSDP1; None under the other engines.
        stage: the ZeRO stage of DeepSpeed; None under the other engines.
        replicas: in FSDP2's mesh, the groups of processes with a whole model each.
        shards: in FSDP2's mesh, the processes that share a model; 0 if there is no mesh.
        offload: the keys that offload something.
        tp, cp, sp: the processes that share matrices, and those that share the tokens of a row.
    """

    engine: Engine
    strategy: str | None
    stage: int | None
    replicas: int
    shards: int
    offload: tuple[str, ...]
    tp: int = 1
    cp: int = 1
    sp: int = 1

    @property
    def places(self) -> int:
        """The number of processes in the mesh; 0 if there is none or the launch decides."""
        shared = self.tp * self.cp * self.sp
        if self.engine == "zero" and self.sp == 1:
            return 0
        places = self.replicas * max(self.shards, 1) * shared
        return 0 if places == 1 else places


def strategy_of(config: dict) -> ConfigStrategy:
    """Return the strategy of a config, which may be as written or as accelerate reads it."""
    fsdp = config.get("fsdp_config") or {}
    zero = config.get("deepspeed_config") or {}
    mesh = config.get("parallelism_config") or {}
    engine = engine_of(config["distributed_type"], fsdp)
    strategy = None
    if engine == "fsdp1":
        strategy = fsdp.get("fsdp_sharding_strategy", "FULL_SHARD")
    stage = None
    if engine == "zero":
        stage = zero.get("zero_stage", 2)
    return ConfigStrategy(
        engine=engine,
        strategy=strategy,
        stage=stage,
        replicas=mesh.get("parallelism_config_dp_replicate_size", 1),
        shards=mesh.get("parallelism_config_dp_shard_size", 0),
        offload=tuple(key for key, value in {**fsdp, **zero}.items() if offloads(key, value)),
        **{kind: mesh.get(f"parallelism_config_{kind}_size", 1) for kind in SHARING_KINDS},
    )


def engine_of(distributed_type: Any, fsdp: dict) -> Engine:
    """Return the engine that runs under a distributed_type."""
    if distributed_type == "FSDP":
        return "fsdp2" if fsdp.get("fsdp_version", 1) == 2 else "fsdp1"
    if distributed_type == "DEEPSPEED":
        return "zero"
    if str(distributed_type).startswith("MULTI"):
        return "ddp"
    return "single"


def offloads(key: str, value: Any) -> bool:
    """Return whether a key moves parameters, gradients or optimizer state to the host."""
    is_of_state = "offload" in key and "activation" not in key
    return is_of_state and value in (True, "cpu")


def mesh_sizes(config: dict) -> dict[str, int]:
    """Return the sizes of the mesh in parallelism_config; the default is 1."""
    mesh = config.get("parallelism_config", {})
    return {kind: mesh.get(f"parallelism_config_{kind}_size", 1) for kind in MESH_KINDS}


def words_of_mesh(sizes: Mapping[str, int]) -> str:
    """Return the sizes of a mesh in words, those of 1 left out: "2 replicas x 2 shards x TP 2"."""
    words = []
    for kind, name in (("dp_replicate", "replicas"), ("dp_shard", "shards")):
        if sizes[kind] > 1:
            words.append(f"{sizes[kind]} {name}")
    for kind in SHARING_KINDS:
        if sizes[kind] > 1:
            words.append(f"{kind.upper()} {sizes[kind]}")
    return " x ".join(words)


def how_to_fit_mesh(sizes: Mapping[str, int], processes: int) -> str:
    """Return what to change if a mesh has another number of places than there are processes.

    Each of the ways that are named is enough. Ranks that share rows or shards stay if possible,
    since the memory of each process depends on their number.

    Args:
        sizes: as `mesh_sizes` returns them.
        processes: that are launched.
    """
    places = math.prod(sizes.values())
    if sizes["tp"] == places:  # without FSDP there is nothing but the group
        return how_to_fit_group(places, processes)
    fitting = size_that_fits(sizes, processes)
    if fitting is not None:
        kind, size = fitting
        return f"set parallelism_config_{kind}_size to {size}"
    steps = (places // sizes["dp_replicate"], places // sizes["dp_shard"])
    fewer = max(processes // step * step for step in steps)
    fitting = size_that_fits(sizes, fewer)
    if fewer <= places or fitting is None:
        return f"launch {places} processes"
    kind, size = fitting
    return f"launch {fewer} processes and set parallelism_config_{kind}_size to {size}"


def how_to_fit_group(size: int, processes: int) -> str:
    """Return what to change if a single tensor parallel group has other processes than its size."""
    cure = f"launch {size} processes"
    if processes % size:
        return cure
    sizes = f"parallelism_config_dp_shard_size {processes // size}"
    if size != 2:
        sizes += f" and parallelism_config_tp_size {size}"
    return f"{cure}, or use fsdp2_tp.yaml of the recipes with {sizes}"


def size_that_fits(sizes: Mapping[str, int], processes: int) -> tuple[str, int] | None:
    """Return which size makes a mesh fit a number of processes, and its value; None if none does.

    accelerate replicates no group that shares rows or matrices without shards.
    """
    shared = math.prod(sizes[kind] for kind in SHARING_KINDS)
    group = shared * sizes["dp_shard"]
    if processes and processes % group == 0 and (sizes["dp_shard"] > 1 or shared == 1):
        return "dp_replicate", processes // group
    shards, rest = divmod(processes, shared * sizes["dp_replicate"])
    needs_shards = sizes["dp_replicate"] > 1 or sizes["cp"] * sizes["sp"] == 1
    if rest or shards < 1 or (needs_shards and shards == 1):
        return None
    return "dp_shard", shards


def strategy_run(config: dict) -> str:
    """Return the strategy that runs, in FSDP1's terms, which lack ZeRO-1 and ZeRO-2.

    Args:
        config: a config as accelerate reads it.
    """
    requested = strategy_of(config)
    if requested.engine == "fsdp2":
        strategy = config["fsdp_config"][SHARDING_KEY[2]]
        if mesh_sizes(config)["dp_replicate"] > 1:
            return HYBRID.get(strategy, strategy)
        return strategy
    return requested.strategy or ZERO_STRATEGIES[requested.stage or 0]


def shards_of(requested: ConfigStrategy, processes: int, processes_per_node: int) -> dict[str, int]:
    """Return into how many shards each kind of state is split, {kind: count}; 1 is whole.

    Under tensor parallelism it is the part of a rank that is split so.
    """
    count = processes
    if requested.engine == "fsdp2" and requested.places:
        count = max(requested.shards, 1) * requested.cp
    if requested.engine in ("single", "ddp") or requested.strategy == "NO_SHARD":
        count = 1
    elif requested.strategy == "HYBRID_SHARD":
        count = processes_per_node
    stage = requested.stage
    if stage is None:  # all sharded strategies of FSDP split parameters while they are not in use
        stage = 3
    return {kind: count if stage >= first else 1 for kind, first in SPLIT_FROM_STAGE.items()}
