"""The strategy that a config asks for: engine, sharding, mesh, offload, and who holds what."""

from dataclasses import dataclass
from typing import Any, Literal

# The key that each version of FSDP reads; it ignores the other one
SHARDING_KEY = {1: "fsdp_sharding_strategy", 2: "fsdp_reshard_after_forward"}
# The ZeRO stage from which on DeepSpeed offloads
OFFLOADED_FROM_STAGE = {"offload_optimizer": 1, "offload_param": 3}
MESH_KINDS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
# FSDP2's strategies on a mesh with replicas, in FSDP1's words
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}
# The ZeRO stage from which on each kind of state is split
SPLIT_FROM_STAGE = {"parameters": 3, "gradients": 2, "optimizer": 1, "master": 1}
ZERO_STRATEGIES = ("NO_SHARD", "ZeRO-1", "ZeRO-2", "FULL_SHARD")

Engine = Literal["single", "ddp", "fsdp1", "fsdp2", "zero"]


@dataclass(frozen=True)
class ConfigStrategy:
    """What an accelerate config asks for.

    Attributes:
        engine: single, ddp, fsdp1, fsdp2 or zero.
        strategy: FSDP1's, None under the other engines.
        stage: DeepSpeed's, None under the other engines.
        replicas: groups of processes with a whole model each, of FSDP2's mesh.
        shards: processes that share a model, of FSDP2's mesh; 0 if there is no mesh.
        offload: the keys that offload something.
    """

    engine: Engine
    strategy: str | None
    stage: int | None
    replicas: int
    shards: int
    offload: tuple[str, ...]


def strategy_of(config: dict) -> ConfigStrategy:
    """Return what a config asks for, as written or as accelerate reads it."""
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
    """Return the sizes of the mesh in parallelism_config, 1 where nothing is written."""
    mesh = config.get("parallelism_config", {})
    return {kind: mesh.get(f"parallelism_config_{kind}_size", 1) for kind in MESH_KINDS}


def strategy_run(config: dict) -> str:
    """Return the strategy in force in FSDP1's words; ZeRO-1 and ZeRO-2 have none there.

    The config is as accelerate reads it.
    """
    asked = strategy_of(config)
    if asked.engine == "fsdp2":
        strategy = config["fsdp_config"][SHARDING_KEY[2]]
        if mesh_sizes(config)["dp_replicate"] > 1:
            return HYBRID.get(strategy, strategy)
        return strategy
    return asked.strategy or ZERO_STRATEGIES[asked.stage or 0]


def shards_of(asked: ConfigStrategy, processes: int, processes_per_node: int) -> dict[str, int]:
    """Return into how many shards each kind of state is split, {kind: count}; 1 is whole."""
    count = asked.shards or processes
    if asked.engine in ("single", "ddp") or asked.strategy == "NO_SHARD":
        count = 1
    elif asked.strategy == "HYBRID_SHARD":
        count = processes_per_node
    stage = asked.stage
    if stage is None:  # FSDP also splits parameters at rest, in each of its sharded strategies.
        stage = 3
    return {kind: count if stage >= first else 1 for kind, first in SPLIT_FROM_STAGE.items()}
