# SPDX-License-Identifier: Apache-2.0
"""What an accelerate config asks for: engine, sharding, mesh and offload.

Nothing of accelerate is loaded. Whether accelerate does what a config says is for check_config.py,
and for the recipe that is launched with it.
"""

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import yaml

MESH_KINDS = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
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


def read(path: str | Path) -> dict:
    """Return the content of a config with full names, also for what its DeepSpeed JSON has.

    Raises ValueError if it is not a config.
    """
    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict) or "distributed_type" not in content:
        raise ValueError(f"{path} is not an accelerate config: it has no distributed_type")
    fsdp = content.get("fsdp_config") or {}  # accelerate takes its keys without the prefix too
    content["fsdp_config"] = {f"fsdp_{key.removeprefix('fsdp_')}": fsdp[key] for key in fsdp}
    zero = content.get("deepspeed_config") or {}
    if zero.get("deepspeed_config_file"):
        deepspeed = json.loads(Path(zero["deepspeed_config_file"]).read_text(encoding="utf-8"))
        settings = deepspeed.get("zero_optimization", {})
        zero["zero_stage"] = settings.get("stage", 0)
        for what in ("offload_optimizer", "offload_param"):
            zero[f"{what}_device"] = settings.get(what, {}).get("device", "none")
        on = [kind for kind in ("fp16", "bf16") if deepspeed.get(kind, {}).get("enabled") is True]
        content["mixed_precision"] = (*on, "no")[0]
    return content


def strategy_of(content: dict) -> ConfigStrategy:
    """Return the strategy of a config."""
    fsdp = content.get("fsdp_config") or {}
    zero = content.get("deepspeed_config") or {}
    mesh = content.get("parallelism_config") or {}
    engine = engine_of(content, fsdp)
    stage = None
    if engine == "zero":
        stage = int(zero.get("zero_stage", 2))
    sizes = {kind: mesh.get(f"parallelism_config_{kind}_size", 1) for kind in MESH_KINDS}
    in_force = ZERO_STRATEGIES[stage or 0]
    if engine == "fsdp1":
        in_force = sharding_strategy(fsdp.get("fsdp_sharding_strategy", "FULL_SHARD"))
    elif engine == "fsdp2":
        in_force = sharding_strategy(fsdp.get("fsdp_reshard_after_forward", True))
        if sizes["dp_replicate"] > 1:
            in_force = HYBRID.get(in_force, in_force)
    offload = []
    for key, value in {**fsdp, **zero}.items():
        if "offload" in key and "activation" not in key and value in (True, "cpu"):
            offload.append(key)
    places = prod(sizes.values())
    has_no_mesh = places == 1 or (engine == "zero" and sizes["sp"] == 1)
    return ConfigStrategy(
        engine=engine,
        stage=stage,
        in_force=in_force,
        shards=mesh.get("parallelism_config_dp_shard_size", 0),
        offload=tuple(offload),
        tp=sizes["tp"],
        cp=sizes["cp"],
        sp=sizes["sp"],
        places=0 if has_no_mesh else places,
    )


def engine_of(content: dict, fsdp: dict) -> Engine:
    """Return the engine that runs under a config, of which `fsdp` is the section of FSDP."""
    kind = str(content["distributed_type"])
    if kind == "FSDP" and str(fsdp.get("fsdp_version", 1)) == "2":
        return "fsdp2"
    if kind == "FSDP":
        return "fsdp1"
    if kind == "DEEPSPEED":
        return "zero"
    return "ddp" if kind.startswith("MULTI") else "single"


def sharding_strategy(value: Any) -> str:
    """Return the name of a strategy that may be a name, a number from 1, or a truth value."""
    word = str(value).upper()
    if word.isdigit():
        return STRATEGIES[int(word) - 1]
    return {"TRUE": "FULL_SHARD", "FALSE": "SHARD_GRAD_OP"}.get(word, word)
