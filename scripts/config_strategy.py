# SPDX-License-Identifier: Apache-2.0
"""What an accelerate config asks for: engine, sharding, mesh and offload.

Whether accelerate does what a config says is for check_config.py, and for the recipe that is
launched with it.
"""

import json
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ZERO_STRATEGIES = ("NO_SHARD", "ZeRO-1", "ZeRO-2", "FULL_SHARD")
# FSDP1's names for FSDP2's strategies on a mesh with replicas
HYBRID = {"FULL_SHARD": "HYBRID_SHARD", "SHARD_GRAD_OP": "HYBRID_SHARD_ZERO2"}

Engine = Literal["single", "ddp", "fsdp1", "fsdp2", "zero"]


@dataclass(frozen=True)
class ConfigStrategy:
    """The strategy that an accelerate config asks for.

    Attributes:
        engine: single, ddp, fsdp1, fsdp2 or zero.
        stage: the ZeRO stage of DeepSpeed; None under the other engines.
        in_force: the strategy in FSDP1's words, which lack ZeRO-1 and ZeRO-2.
        shards: in FSDP2's mesh, the processes that share a model; 0 if there is no mesh.
        offload: the keys that offload something.
        tp, cp, sp: the processes that share matrices, and those that share the tokens of a row.
        places: the number of processes in the mesh; 0 if there is none or the launch decides.
    """

    engine: Engine
    stage: int | None
    in_force: str
    shards: int
    offload: tuple[str, ...]
    tp: int
    cp: int
    sp: int
    places: int

    @property
    def ranks_per_row(self) -> int:
        """How many processes share each row."""
        return self.tp * self.cp * self.sp

    @property
    def groups_are_machines(self) -> bool:
        """Whether the groups that share a model are the machines, as FSDP1 forms them."""
        return self.engine == "fsdp1" and self.in_force.startswith("HYBRID")

    def shards_on(self, ranks: int, ranks_per_machine: int) -> int:
        """Return among how many ranks a model is split, TP apart, where it is split at all."""
        if self.engine in ("single", "ddp") or self.in_force == "NO_SHARD":
            return 1
        if self.groups_are_machines:
            return ranks_per_machine
        if self.places and self.engine == "fsdp2":
            return max(self.shards, 1) * self.cp
        return ranks


def read(path: str | Path, launch: Namespace | None = None) -> Any:
    """Return an `extras.configs.config.Config`, also of what its DeepSpeed JSON has.

    `launch` has options of the launcher, which replace values.

    Raises ValueError if it is not a config.
    """
    import yaml

    from extras.configs.config import read_config  # Imports accelerate, which takes seconds

    try:
        config = read_config(str(path), launch)
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if "distributed_type" not in config.values:
        raise ValueError(f"{path} is not an accelerate config: it has no distributed_type")
    if config.json is not None:
        deepspeed = json.loads(Path(config.json).read_text(encoding="utf-8"))
        settings = deepspeed.get("zero_optimization", {})
        config.values["zero_stage"] = settings.get("stage", 0)
        for what in ("offload_optimizer", "offload_param"):
            config.values[f"{what}_device"] = settings.get(what, {}).get("device", "none")
        on = [kind for kind in ("fp16", "bf16") if deepspeed.get(kind, {}).get("enabled") is True]
        config.values["mixed_precision"] = (*on, "no")[0]
    return config


def strategy_of(config: Any) -> ConfigStrategy:
    """Return the strategy of what `read` returns."""
    engine: Engine = "ddp" if config.engine.startswith("MULTI") else "single"
    in_force = ZERO_STRATEGIES[0]
    stage = None
    if config.engine == "DEEPSPEED":
        engine = "zero"
        stage = config.number("zero_stage", 2)
        in_force = ZERO_STRATEGIES[stage]
    elif config.fsdp == 2:
        engine = "fsdp2"
        in_force = config.strategy("fsdp_reshard_after_forward")
        if config.size("dp_replicate") > 1:
            in_force = HYBRID.get(in_force, in_force)
    elif config.fsdp:
        engine = "fsdp1"
        in_force = config.strategy("fsdp_sharding_strategy")
    offload = []
    for key, value in config.values.items():
        if "offload" in key and "activation" not in key and value in (True, "cpu"):
            offload.append(key)
    has_no_mesh = config.places == 1 or (engine == "zero" and config.size("sp") == 1)
    return ConfigStrategy(
        engine=engine,
        stage=stage,
        in_force=in_force,
        shards=config.number("parallelism_config_dp_shard_size"),
        offload=tuple(offload),
        tp=config.size("tp"),
        cp=config.size("cp"),
        sp=config.size("sp"),
        places=0 if has_no_mesh else config.places,
    )
