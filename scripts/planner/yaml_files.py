# SPDX-License-Identifier: Apache-2.0
"""What the planner needs from accelerate configs. No other module here imports their reader."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import config_strategy
from config_strategy import SHARING_KINDS, ConfigStrategy, strategy_of
from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, SAME_AS_FIRST_CHOICE

from .errors import UnplannableError

Config = dict[str, Any]  # the content of a YAML


def read(path: str | Path) -> Config:
    """Read a config. Raises UnplannableError if it is not one."""
    try:
        return config_strategy.read(path)
    except ValueError as error:
        raise UnplannableError(str(error)) from None


def read_without_faults(path: str, sizes: Mapping[str, int]) -> Config:
    """Read a user's config, with the sizes of its mesh that the command line sets.

    Raises UnplannableError also if accelerate would stop, or run something other than what is
    written.
    """
    # Only here, since they load accelerate
    from core.config_names import find_unknown_keys
    from extras.configs.rules import check

    config = read(path)
    for fault in [*find_unknown_keys(path), *check(path, for_recipes=False)]:
        if fault.severity == "error":
            raise UnplannableError(f"{path} would not do what it says: {fault}")
    return with_sizes(config, sizes)


def shipped_files() -> list[Path]:
    """Return the files of accelerate_configs/ by name under which each rank has rows of its own.

    Of those that mean the same, one is left.
    """
    of_others = {SAME_AS_FIRST_CHOICE, OF_PIPELINES, *OF_EXPERTS}
    names = sorted(set(CONFIGS.glob("*.yaml")) - of_others)
    return [path for path in names if strategy_of(read(path)).ranks_per_row == 1]


def expert_files() -> list[Path]:
    """Return the files of accelerate_configs/ under which a mixture's experts can be spread."""
    return sorted(OF_EXPERTS)


def mesh_files() -> list[Path]:
    """Return the files of accelerate_configs/ by name under which ranks share rows."""
    names = sorted(CONFIGS.glob("*.yaml"))
    return [path for path in names if strategy_of(read(path)).ranks_per_row > 1]


def with_sizes(config: Config, sizes: Mapping[str, int]) -> Config:
    """Return a config with other sizes of its mesh, such as {"cp_size": 4}."""
    if not sizes:
        return config
    mesh = dict(config.get("parallelism_config", {}))
    mesh |= {f"parallelism_config_{key}": size for key, size in sizes.items()}
    return config | {"parallelism_config": mesh}


def sizes_on(config: Config, ranks: int, machines: int) -> Iterator[dict[str, int]]:
    """Yield the sizes of the mesh of a config that are worth trying on a number of ranks.

    Ranks that share rows are in one machine, since they wait for each other in every layer; their
    number is a power of two, which the heads of most models allow. Replicas are machines.
    """
    strategy = strategy_of(config)
    per_machine = ranks // machines
    sizes = {}
    if strategy.replicas > 1:
        if machines == 1:
            return
        sizes["dp_replicate_size"] = machines
    kind = next(kind for kind in SHARING_KINDS if getattr(strategy, kind) > 1)
    share = 2
    while share <= per_machine:
        groups = ranks // (share * sizes.get("dp_replicate_size", 1))
        if per_machine % share == 0 and can_be_formed(strategy, groups):
            if strategy.engine != "ddp":
                sizes["dp_shard_size"] = groups
            yield sizes | {f"{kind}_size": share}
        share *= 2


def can_be_formed(strategy: ConfigStrategy, groups: int) -> bool:
    """Return whether a strategy has a mesh of a number of groups that each share rows.

    Without an engine that shards there is one group. FSDP2 needs several shards besides TP.
    """
    if strategy.engine == "ddp":
        return groups == 1
    return groups > 1 or strategy.tp == 1


def makes_sense_on(config: Config, ranks: int, machines: int) -> bool:
    """Return whether a config is worth trying on a number of ranks.

    A single rank splits nothing, so that only offload differs from one plain process. The groups of
    FSDP1's HYBRID_SHARD are machines: there must be several, with several GPUs each.
    """
    strategy = strategy_of(config)
    if ranks == 1:
        return strategy.engine == "single" or bool(strategy.offload)
    if strategy.engine == "single":
        return False
    if strategy.groups_are_machines:
        return 1 < ranks // machines < ranks
    return True
