# SPDX-License-Identifier: Apache-2.0
"""What the planner needs from accelerate configs. No other module here imports their reader."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from components import config_files, config_strategy
from components.config_findings import IGNORED, STOPS
from components.config_reading import as_read
from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, SAME_AS_FIRST_CHOICE

from .errors import UnplannableError

Config = dict[str, Any]  # as accelerate reads it: defaults filled in, full names, real values


@dataclass(frozen=True)
class Strategy:
    """What a config says about engine and sharding."""

    engine: str  # single, ddp, fsdp1, fsdp2 or zero
    stage: int  # the ZeRO stage; 0 for the other engines
    replicas: int  # groups of the mesh that each hold a whole model
    shards: int  # ranks per group of the mesh with rows of their own; 0 without a mesh
    in_force: str  # in FSDP1's words, such as FULL_SHARD, also for the other engines
    is_hybrid_fsdp1: bool
    offloads_parameters: bool
    offloads_optimizer: bool
    tp: int = 1  # ranks that share the matrices of each layer
    cp: int = 1  # ranks that share the tokens of each row, in attention by a ring
    sp: int = 1  # ranks that share the tokens of each row, in attention the heads
    places: int = 0  # ranks of the mesh; 0 without one, and where any multiple is possible

    @property
    def ranks_per_row(self) -> int:
        """How many ranks share each row."""
        return self.tp * self.cp * self.sp

    @property
    def offloads(self) -> bool:
        """Whether anything is kept on the host."""
        return self.offloads_parameters or self.offloads_optimizer


def strategy_of(config: Config) -> Strategy:
    """Return what a config says about engine and sharding."""
    facts = config_strategy.strategy_of(config)
    offload = set(facts.offload)
    fsdp_offloads = "fsdp_offload_params" in offload
    return Strategy(
        engine=facts.engine,
        stage=facts.stage or 0,
        replicas=facts.replicas,
        shards=facts.shards,
        in_force=config_strategy.strategy_run(config),
        is_hybrid_fsdp1=str(facts.strategy).startswith("HYBRID"),
        offloads_parameters=fsdp_offloads or "offload_param_device" in offload,
        offloads_optimizer=fsdp_offloads or "offload_optimizer_device" in offload,
        tp=facts.tp,
        cp=facts.cp,
        sp=facts.sp,
        places=facts.places,
    )


def misfit_of_mesh(config: Config, places: int, ranks: int) -> str:
    """Return that the mesh of a config has another number of places than ranks, and what to do."""
    sizes = config_strategy.mesh_sizes(config)
    return (
        f"the config's mesh is {config_strategy.words_of_mesh(sizes)}: it needs {places} "
        f"processes, not {ranks}: {config_strategy.how_to_fit_mesh(sizes, ranks)}"
    )


def read(path: str | Path) -> Config:
    """Read a config. Raises UnplannableError if it is not one."""
    return as_accelerate_reads(load(path))


def read_without_faults(path: str | Path, sizes: Mapping[str, int]) -> Config:
    """Read a user's config, with the sizes of its mesh that the command line sets.

    Raises UnplannableError also if accelerate would stop, or run something other than what is
    written.
    """
    file = load(path)
    findings, _ = config_files.find_faults(file)
    for finding in findings:
        if finding.kind in (STOPS, IGNORED):
            key = ".".join(map(str, finding.path))
            raise UnplannableError(
                f"{path} would not do what it says: {key}: {finding.reason}; "
                f"see python scripts/check_config.py {path}"
            )
    return with_sizes(as_accelerate_reads(file), sizes)


def load(path: str | Path) -> config_files.ConfigFile:
    """Return the file as written. Raises UnplannableError if it is not an accelerate config."""
    try:
        return config_files.load(path)
    except ValueError as error:
        raise UnplannableError(str(error)) from None


def as_accelerate_reads(file: config_files.ConfigFile) -> Config:
    """Return the config that accelerate makes of a file, and of the DeepSpeed JSON it names."""
    if file.deepspeed is None:
        return as_read(file.content)
    return as_read(file.content, file.deepspeed.content)


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
    kind = next(kind for kind in config_strategy.SHARING_KINDS if getattr(strategy, kind) > 1)
    share = 2
    while share <= per_machine:
        groups = ranks // (share * sizes.get("dp_replicate_size", 1))
        if per_machine % share == 0 and can_be_formed(strategy, groups):
            if strategy.engine != "ddp":
                sizes["dp_shard_size"] = groups
            yield sizes | {f"{kind}_size": share}
        share *= 2


def can_be_formed(strategy: Strategy, groups: int) -> bool:
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
        return strategy.engine == "single" or strategy.offloads
    if strategy.engine == "single":
        return False
    if strategy.is_hybrid_fsdp1:
        return 1 < ranks // machines < ranks
    return True
