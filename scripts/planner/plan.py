# SPDX-License-Identifier: Apache-2.0
"""What determines memory: the recipe's arguments, and what an accelerate config makes of them."""

import contextlib
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from config_strategy import ConfigStrategy, strategy_of
from core.cli import find_conflicts
from core.engine import Layout, find_faults_of_dtypes, find_faults_of_engine
from core.extras import hooks
from extras.mesh.layout import MeshLayout

from .request import UnplannableError

DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # what mixed precision computes in
REHEARSE = "rehearse it: its shard report has the bytes of each rank"


@dataclass(frozen=True)
class Plan:
    """What determines memory. By default it is one plain process in fp32.

    Attributes:
        args: of the recipe.
        engine: single, ddp, fsdp1, fsdp2 or zero; stage is that of ZeRO.
        shards: ranks that share one copy of the state, under TP of what a rank has of it.
        reshards: FSDP: whether parameters are freed between forward and backward pass.
        mixed_precision: no, bf16 or fp16.
        wraps_layers: FSDP: whether each layer is a unit, or the whole model is one.
        prefetches: FSDP1: BACKWARD_PRE, gather the next unit while one is computed.
        tp, cp, sp: ranks that share matrices, and the tokens of a row by a ring or by heads.
        machines: hosts, with the same number of ranks each.
    """

    args: Any
    engine: str = "single"
    stage: int = 0
    ranks: int = 1
    shards: int = 1
    reshards: bool = True
    mixed_precision: str = "no"
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    wraps_layers: bool = True
    prefetches: bool = False
    name: str = ""
    tp: int = 1
    cp: int = 1
    sp: int = 1
    machines: int = 1

    @property
    def copies(self) -> int:
        """Ranks that have the same rows."""
        return self.tp * self.cp * self.sp

    @property
    def replicas(self) -> int:
        """Groups of ranks that each share one copy of the state."""
        return self.ranks // (self.shards * self.tp)

    @property
    def low(self) -> torch.dtype | None:
        """The dtype of mixed precision, or None without it."""
        name = DTYPES.get(self.mixed_precision)
        return None if name is None else getattr(torch, name)

    @property
    def itemsize(self) -> int:
        """Bytes per element that DeepSpeed computes in: those of mixed precision, or of fp32."""
        return (self.low or torch.float32).itemsize

    @property
    def casts(self) -> bool:
        """Whether the engine casts the weights that the model computes with."""
        return self.low is not None and self.engine in ("fsdp1", "fsdp2", "zero")

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast computes in; DeepSpeed casts the model instead."""
        return None if self.engine == "zero" else self.low

    def describe(self, engine: str) -> str:
        """Return the name of a strategy with what the mesh adds to its engine, such as "TP 2"."""
        sizes = {"CP": self.cp, "SP": self.sp, "TP": self.tp}
        words = [engine, *(f"{kind} {size}" for kind, size in sizes.items() if size > 1)]
        return " x ".join(word for word in words if word)


def plan_of(
    args: Any,
    config: Mapping[str, Any],
    num_processes: int | None = None,
    num_machines: int | None = None,
    mixed_precision: str | None = None,
) -> Plan:
    """Return the Plan of a recipe's arguments under an accelerate config.

    The numbers and the precision are those of the launcher's command line, None for the config's.

    Raises:
        UnplannableError: for what the recipe would refuse, for ranks that the config cannot run on,
            and for keys whose effect on memory is not known here.
    """
    strategy = strategy_of(dict(config))
    ranks, machines = ranks_and_machines(config, strategy, num_processes, num_machines)
    offload = set(strategy.offload)
    engine = strategy.engine
    if engine == "ddp" and (ranks == 1 or strategy.tp > 1):
        engine = "single"  # accelerate wraps no model in DDP whose matrices are split.
    plan = Plan(
        args,
        engine=engine,
        stage=strategy.stage or 0,
        ranks=ranks,
        shards=ranks // strategy.tp,
        mixed_precision=mixed_precision or config.get("mixed_precision", "no"),
        offloads_parameters=bool({"fsdp_offload_params", "offload_param_device"} & offload),
        offloads_optimizer=bool({"fsdp_offload_params", "offload_optimizer_device"} & offload),
        tp=strategy.tp,
        cp=strategy.cp,
        sp=strategy.sp,
        machines=machines,
    )
    plan = with_engine(plan, config, strategy)
    problems = [*find_unknown(plan, config), *find_problems(plan, config)]
    if problems:
        raise UnplannableError("; ".join(dict.fromkeys(problems)))
    return plan


def ranks_and_machines(
    config: Mapping[str, Any],
    strategy: ConfigStrategy,
    num_processes: int | None,
    num_machines: int | None,
) -> tuple[int, int]:
    """Return (ranks, machines). Raises UnplannableError if the config cannot run on them."""
    mesh = strategy.places
    ranks = num_processes
    if ranks is None:
        ranks = max(config.get("num_processes") or 1, mesh)
    machines = num_machines
    if machines is None:
        machines = config.get("num_machines", 1)
    if ranks < 1 or machines < 1 or ranks % machines:
        raise UnplannableError(
            f"--num_processes {ranks} on {machines} machines: must be at least 1, and the same "
            "number on each"
        )
    if mesh and ranks != mesh:
        raise UnplannableError(
            f"the config's mesh needs {mesh} processes, not {ranks}: launch {mesh}, or change the "
            "sizes in parallelism_config"
        )
    if strategy.engine == "single" and ranks > 1:
        raise UnplannableError(
            f"the config is for one process: --num_processes {ranks} needs ddp.yaml or another"
        )
    return ranks, machines


def with_engine(plan: Plan, config: Mapping[str, Any], strategy: ConfigStrategy) -> Plan:
    """Return the plan with its name and, under FSDP, with its settings."""
    if plan.engine == "zero":
        return replace(plan, name=plan.describe(f"DeepSpeed ZeRO-{plan.stage}"))
    if not plan.engine.startswith("fsdp"):
        name = "DDP" if plan.engine == "ddp" else ""
        return replace(plan, name=plan.describe(name) or "one process")
    settings = config.get("fsdp_config", {})
    shards = strategy.shards_on(plan.ranks, plan.ranks // plan.machines)
    name = f"{plan.engine.upper()} {strategy.in_force}"
    if plan.engine == "fsdp1" and shards == 1:
        name = "FSDP1 NO_SHARD"  # torch switches to it on a single rank, whatever the strategy.
    policy = settings.get("fsdp_auto_wrap_policy") or "NO_WRAP"
    return replace(
        plan,
        shards=shards,
        name=plan.describe(name),
        reshards=strategy.in_force in ("FULL_SHARD", "HYBRID_SHARD"),
        wraps_layers=policy == "TRANSFORMER_BASED_WRAP",
        prefetches=settings.get("fsdp_backward_prefetch") == "BACKWARD_PRE",
    )


# ---- Refusals ----
def find_unknown(plan: Plan, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what this planner does not know the memory of."""
    fsdp = config.get("fsdp_config", {})
    policy = fsdp.get("fsdp_auto_wrap_policy") or "NO_WRAP"
    if plan.mixed_precision not in ("no", *DTYPES):
        yield f"mixed_precision {plan.mixed_precision}: only no, bf16 and fp16 can be planned"
    if plan.engine.startswith("fsdp"):
        if not plan.wraps_layers:
            yield f"fsdp_auto_wrap_policy {policy}: only TRANSFORMER_BASED_WRAP can be planned"
        if fsdp.get("fsdp_activation_checkpointing"):
            yield (
                "fsdp_activation_checkpointing: cannot be planned; use --gradient_checkpointing, "
                "which does the same"
            )
        if fsdp.get("fsdp_transformer_layer_cls_to_wrap"):
            yield "fsdp_transformer_layer_cls_to_wrap: cannot be planned; leave it out"
    if config.get("deepspeed_config", {}).get("deepspeed_config_file"):
        yield "deepspeed_config_file: cannot be planned; use the keys of the YAML"
    if getattr(plan.args, "ep_size", 1) > 1:
        yield f"--ep_size: how many tokens arrive at a rank's experts is not traced: {REHEARSE}"
    if plan.cp > 1 and hasattr(plan.args, "router_aux_loss_coef"):
        yield f"context parallelism of a mixture looks at the values of rows: {REHEARSE}"


def find_problems(plan: Plan, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the recipe or an engine would refuse to start."""
    args = plan.args
    yield from find_conflicts(args)
    yield from find_misfits(plan)
    accelerator = stand_in(plan, config)
    yield from find_faults_of_engine(accelerator)
    yield from find_faults_of_dtypes(args, accelerator)
    layout = Layout(accelerator)
    if plan.copies > 1:
        layout = MeshLayout(accelerator, {"cp": plan.cp, "sp": plan.sp, "tp": plan.tp})
    for hook in hooks([name for name in args.EXTRAS if name in ("mesh", "experts")], "find_faults"):
        yield from hook(args, layout)


def find_misfits(plan: Plan) -> Iterator[str]:
    """Yield what ends in an error of the engine's own while a run starts."""
    args = plan.args
    name = plan.name
    in_8_bits = getattr(args, "load_in_8bit", False)
    if in_8_bits and plan.engine.startswith("fsdp"):
        yield f"{name} cannot shard int8 weights"
    if args.optim.endswith("bit") and (plan.engine.startswith("fsdp") or plan.engine == "zero"):
        yield f"--optim {args.optim} cannot hold the shards of {name}"
    if plan.cp > 1 and (getattr(args, "packing", False) or getattr(args, "padding_free", False)):
        yield "--packing, --padding_free: rows of one line would see each other in a ring"


# ---- The first rank ----
def stand_in(plan: Plan, config: Mapping[str, Any], mesh: Any = None) -> Any:
    """Return what the recipes ask of the first rank's Accelerator.

    Args:
        config: of accelerate; of a plan without one {}.
        mesh: torch's mesh of the ranks that share rows or matrices, or None.
    """
    fsdp = config.get("fsdp_config", {})
    plugin = zero = None
    kind = DistributedType.NO
    if plan.engine.startswith("fsdp"):
        kind = DistributedType.FSDP
        plugin = SimpleNamespace(
            fsdp_version=int(plan.engine[-1]),
            # A hybrid one would be compared with the GPUs of this machine
            sharding_strategy=SimpleNamespace(name="FULL_SHARD"),
            reshard_after_forward=plan.reshards,
            use_orig_params=fsdp.get("fsdp_use_orig_params", True) is not False,
            cpu_ram_efficient_loading=False,
            ignored_modules=None,
        )
    if plan.engine == "zero":
        zero = SimpleNamespace(zero_stage=plan.stage, deepspeed_config={})
    attention = config.get("parallelism_config", {}).get(
        "parallelism_config_sp_attn_implementation"
    )
    parallelism = SimpleNamespace(
        dp_replicate_size=plan.replicas if plan.engine == "fsdp2" else 1,
        cp_size=plan.cp,
        sp_size=plan.sp,
        tp_size=plan.tp,
        sp_handler=SimpleNamespace(sp_attn_implementation=attention),
    )
    found = SimpleNamespace(
        distributed_type=kind,
        num_processes=plan.ranks,
        process_index=0,
        is_main_process=True,
        is_fsdp2=plan.engine == "fsdp2",
        native_amp=plan.autocast_dtype is not None,
        mixed_precision=plan.mixed_precision,
        device=torch.device("cpu"),
        torch_device_mesh=mesh,
    )
    found.parallelism_config = parallelism
    found.state = SimpleNamespace(fsdp_plugin=plugin, deepspeed_plugin=zero)
    return found


@contextlib.contextmanager
def first_rank(plan: Plan) -> Generator[Layout]:
    """Yield the layout of the first rank; the others are there in name only.

    The ranks that share a row by its heads are left out: each has an equal part of the tokens.
    """
    if plan.tp * plan.cp == 1:
        yield Layout(stand_in(plan, {}))
        return
    dist.init_process_group("fake", rank=0, world_size=plan.tp * plan.cp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (plan.cp, plan.tp), mesh_dim_names=("cp", "tp"))
        yield MeshLayout(stand_in(plan, {}, mesh), {"cp": plan.cp, "tp": plan.tp})
    finally:
        dist.destroy_process_group()
        # DTensor remembers what it did on a mesh, and takes an equal mesh for the same one.
        _clear_sharding_prop_cache()
