# SPDX-License-Identifier: Apache-2.0
"""Find what makes expert parallelism impossible, or not exact, before the model is loaded."""

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from torch.distributed.fsdp import CPUOffloadPolicy

from components.mesh import Mesh
from components.mesh_checks import read_model_config
from components.pipeline_checks import how_to_divide
from components.strategy import Strategy
from core.arguments import CommonArguments, ExpertAdapterArguments, ExpertParallelArguments
from core.workarounds import fsdp_plugin

# Under which of these names transformers' configs have the number of experts in a layer
NUMBER_OF_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# The style in a plan of transformers that sends tokens to their experts
DISPATCH = "ep_dispatch_experts"


def find_expert_problems(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem, with its fix, for each thing that does not fit expert parallelism."""
    if not isinstance(args, ExpertParallelArguments) or args.ep_size == 1:
        return
    yield from find_misfits_of_launch(args.ep_size, accelerator, experts_of_model(args))
    yield from find_misfits_of_arguments(args, accelerator)
    yield from find_misfits_of_model(args, args.ep_size, accelerator.num_processes)


def experts_of_model(args: CommonArguments) -> int:
    """Return how many experts a layer of the model has, or 0 if that is not known."""
    config = read_model_config(args)
    return 0 if config is None else number_of_experts(config.get_text_config())


def find_misfits_of_launch(size: int, accelerator: Accelerator, experts: int = 0) -> Iterator[str]:
    """Yield a problem for each thing in YAML and launcher that does not fit groups of this size.

    Args:
        experts: of a layer, or 0 if they are not known.
    """
    ranks = accelerator.num_processes
    strategy = Strategy.of(accelerator)
    mesh = Mesh.of(accelerator)
    if strategy.zero_stage is not None or strategy.fsdp_version == 1:
        yield (
            f"--ep_size: {strategy.name} cannot leave experts to the ranks that have them: use "
            "ep.yaml, or fsdp2_ep.yaml with FSDP2"
        )
        return
    if mesh.copies > 1:
        yield (
            f"--ep_size: ranks of {strategy.name} share rows, and experts are spread over ranks "
            "that have rows of their own: use ep.yaml or fsdp2_ep.yaml"
        )
    if strategy.fsdp_version == 2 and mesh.dp_replicate > 1:
        yield (
            "--ep_size: experts would be shards over all replicas: leave "
            "parallelism_config_dp_replicate_size out, as in fsdp2_ep.yaml"
        )
    if ranks % size:
        yield from find_indivisible_numbers(size, ranks, experts)
    yield from find_misfits_of_fsdp(fsdp_plugin(accelerator))


def find_misfits_of_fsdp(plugin: Any) -> Iterator[str]:
    """Yield a problem for each setting of FSDP2 that does not fit expert parallelism.

    Args:
        plugin: accelerate's settings of FSDP, or None.
    """
    if plugin is None:
        return
    if plugin.cpu_ram_efficient_loading:
        # accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict
        yield (
            "--ep_size: each rank reads its own experts, and FSDP would broadcast those of rank 0: "
            "set fsdp_cpu_ram_efficient_loading: false, as in fsdp2_ep.yaml"
        )
    if isinstance(plugin.cpu_offload, CPUOffloadPolicy):
        yield (
            "--ep_size: experts that are offloaded were never compared with one process: set "
            "fsdp_offload_params: false, or leave --ep_size out"
        )


def find_misfits_of_arguments(args: CommonArguments, accelerator: Accelerator) -> Iterator[str]:
    """Yield a problem for each argument that does not fit expert parallelism."""
    adapts_experts = isinstance(args, ExpertAdapterArguments) and args.lora_target_parameters
    if args.use_peft and adapts_experts:
        # peft/tuners/lora/layer.py, ParamWrapper
        yield (
            "--use_peft: peft makes adapters for all experts on each rank, which do not fit the "
            "rank's own: use --lora_target_parameters without a value, or leave --ep_size out"
        )
    if args.optim.endswith("bit"):
        yield f"--optim {args.optim} cannot hold parts of experts: use adamw_torch_fused"
    if accelerator.mixed_precision == "fp16":
        yield (
            "--ep_size: the loss scale of fp16 would be that of each rank's own experts: use "
            "mixed_precision: bf16"
        )


# ---- Model ----
def find_misfits_of_model(args: CommonArguments, size: int, ranks: int) -> Iterator[str]:
    """Yield a problem for each reason why a model's experts cannot be spread over `size` ranks.

    Args:
        ranks: all of them, in groups of this size.
    """
    config = read_model_config(args)
    if config is None:
        return
    yield from find_misfits_of_config(config.get_text_config(), size, ranks)


def find_misfits_of_config(config: Any, size: int, ranks: int | None = None) -> Iterator[str]:
    """Yield a problem for each thing in a config of transformers that forbids spreading experts.

    Args:
        ranks: all of them, in groups of this size; None if they are one group.
    """
    experts = number_of_experts(config)
    if experts == 0:
        yield (
            f"--ep_size: a {config.model_type} model has no experts: leave it out, or train a "
            "mixture of experts"
        )
        return
    if DISPATCH not in (config.base_model_ep_plan or {}).values():
        yield (
            "--ep_size: transformers has no plan by which to spread the experts of a "
            f"{config.model_type} model: leave it out, and use fsdp2_full_shard.yaml"
        )
    groups_of = size if ranks is None else ranks
    if groups_of % size == 0:  # `find_misfits_of_launch` has said it otherwise
        yield from find_indivisible_numbers(size, groups_of, experts)


def find_indivisible_numbers(size: int, ranks: int, experts: int) -> Iterator[str]:
    """Yield a problem if --ep_size does not divide the ranks or the experts of a layer.

    Args:
        experts: their number, or 0 if it is not known.
    """
    reasons = []
    if ranks % size:
        reasons.append(f"{ranks} ranks")
    if experts % size:
        reasons.append(f"the model's {experts} experts")
    if reasons:

        def beside(other: int) -> str | None:
            return None if experts % other else ""

        ways = how_to_divide(size, ranks, "--ep_size", beside)
        yield (
            f"--ep_size {size} does not divide {' and '.join(reasons)}: "
            f"{ways or 'leave --ep_size out'}"
        )


def number_of_experts(config: Any) -> int:
    """Return how many experts a layer of a model has, 0 for a dense one."""
    for name in NUMBER_OF_EXPERTS:
        number = getattr(config, name, None)
        if number:
            return number
    return 0
