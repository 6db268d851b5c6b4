# SPDX-License-Identifier: Apache-2.0
"""What determines memory: the recipe's arguments, and what an accelerate config makes of them.

`plan_of` reads both and refuses what the recipe or the launcher would refuse.
"""

from dataclasses import dataclass, replace

from config_strategy import ConfigStrategy, misfit_of_mesh, strategy_of

from . import recipe
from .errors import UnplannableError
from .mesh import Mesh
from .recipe import RecipeArguments, StagesArguments
from .yaml_files import Config

ITEMSIZES = {"bf16": 2, "fp16": 2}  # bytes per element of each mixed precision
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # their names in torch
RESHARDS = ("FULL_SHARD", "HYBRID_SHARD")
IN_TWO_PARTS = ("interleaved_zero_bubble", "zbv")  # schedules of such backward passes
HYBRIDS = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


@dataclass(frozen=True)
class Plan:
    """What determines memory. By default it is one plain process in fp32."""

    args: RecipeArguments
    engine: str = "single"  # or ddp, fsdp1, fsdp2, zero
    stage: int = 0  # the ZeRO stage
    ranks: int = 1
    shards: int = 1  # ranks that share one copy of the state, under TP of what a rank has of it
    reshards: bool = True  # FSDP: whether parameters are freed between forward and backward pass
    mixed_precision: str = "no"  # or bf16, fp16
    offloads_parameters: bool = False
    offloads_optimizer: bool = False
    wraps_layers: bool = True  # FSDP: whether each layer is a unit, or the whole model one
    prefetches: bool = False  # FSDP1: BACKWARD_PRE, gather the next unit while one is computed
    name: str = ""
    tp: int = 1  # ranks that share the matrices of each layer
    cp: int = 1  # ranks that share the tokens of each row, in attention by a ring
    sp: int = 1  # ranks that share the tokens of each row, in attention the heads
    ep: int = 1  # ranks that share the experts of each layer, with rows of their own
    pp: int = 1  # ranks of a pipeline, which each have other layers
    machines: int = 1  # hosts, with the same number of ranks each

    @property
    def copies(self) -> int:
        """Ranks that have the same rows."""
        return self.tp * self.cp * self.sp

    @property
    def replicas(self) -> int:
        """Groups of ranks that each share one copy of the state."""
        return self.ranks // (self.shards * self.tp * self.pp)

    @property
    def mesh(self) -> Mesh:
        """The mesh of the first rank."""
        groups = self.ranks // (self.copies * self.pp)
        replicas = self.replicas if self.engine == "fsdp2" else 1
        return Mesh(
            replicas,
            groups // replicas,
            self.cp,
            self.sp,
            self.tp,
            pp=self.pp,
            ep=self.ep,
        )

    @property
    def is_fsdp(self) -> bool:
        """Whether FSDP shards, in either version."""
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def low_itemsize(self) -> int | None:
        """Bytes per element of mixed precision, or None without it."""
        return ITEMSIZES.get(self.mixed_precision)

    @property
    def autocast_itemsize(self) -> int | None:
        """Bytes per element that autocast computes in, or None.

        accelerate autocasts the forward pass except under DeepSpeed, which casts the model itself.
        """
        if self.engine == "zero":
            return None
        return self.low_itemsize


def plan_of(
    args: RecipeArguments,
    config: Config,
    num_processes: int | None = None,
    num_machines: int | None = None,
    mixed_precision: str | None = None,
) -> Plan:
    """Return the Plan of the recipe's arguments under an accelerate config.

    The numbers and the precision are those of the launcher's command line, None for the config's.
    Raises UnplannableError for what the recipe would refuse, for ranks that the config cannot run
    on, and for keys whose effect on memory is not known here.
    """
    strategy = strategy_of(config)
    offload = set(strategy.offload)
    ranks, machines = ranks_and_machines(config, strategy, num_processes, num_machines)
    if isinstance(args, StagesArguments):
        return pipeline_plan(args, config, strategy, ranks, machines, mixed_precision)
    plan = Plan(
        args,
        engine=engine_on(strategy, ranks),
        stage=strategy.stage or 0,
        ranks=ranks,
        shards=ranks // strategy.tp,
        mixed_precision=mixed_precision or config.get("mixed_precision", "no"),
        offloads_parameters=bool({"fsdp_offload_params", "offload_param_device"} & offload),
        offloads_optimizer=bool({"fsdp_offload_params", "offload_optimizer_device"} & offload),
        tp=strategy.tp,
        cp=strategy.cp,
        sp=strategy.sp,
        ep=recipe.expert_ranks_of(args),
        machines=machines,
    )
    if plan.is_fsdp:
        plan = with_sharding(plan, config, strategy, ranks // machines)
    else:
        plan = replace(plan, name=name_of(plan))
    refuse_unknown_precision(plan)
    refuse_unknown_keys(plan, config)
    refuse_as_the_recipe(plan, config)
    return plan


def pipeline_plan(
    args: StagesArguments,
    config: Config,
    strategy: ConfigStrategy,
    ranks: int,
    machines: int,
    mixed_precision: str | None,
) -> Plan:
    """Return the plan of pipelines: ranks with the same stages are replicas or FSDP2's shards.

    FSDP2 leaves weights whole between the passes, or each micro-batch would gather them. Raises
    UnplannableError for what the recipe would refuse.
    """
    if strategy.engine not in ("single", "ddp") or strategy.ranks_per_row > 1:
        raise UnplannableError(
            "no engine of a YAML shards a pipeline: use accelerate_configs/pp.yaml, with "
            "--shard_stages for FSDP2 within each stage"
        )
    plan = Plan(
        args,
        ranks=ranks,
        mixed_precision=mixed_precision or config.get("mixed_precision", "no"),
        name=name_of_pipelines(args, ranks),
        pp=args.pp_size,
        machines=machines,
    )
    refuse_unknown_precision(plan)
    refuse_as_the_recipe(plan, config)
    if args.gradient_checkpointing and args.pipeline_schedule in IN_TWO_PARTS:
        raise UnplannableError(
            f"--gradient_checkpointing with {args.pipeline_schedule} cannot be planned, since "
            "torch computes a checkpointed layer again for each of its weights: use "
            "--pipeline_schedule 1f1b or interleaved"
        )
    if args.shard_stages:
        return replace(plan, engine="fsdp2", shards=ranks // plan.pp, reshards=False)
    return plan


def name_of_pipelines(args: StagesArguments, ranks: int) -> str:
    """Return the name of a strategy with pipelines, and the schedule."""
    words = [f"PP {args.pp_size}"]
    if ranks > args.pp_size:
        kind = "FSDP2" if args.shard_stages else "replicas"
        words.append(f"{kind} {ranks // args.pp_size}")
    return f"{' x '.join(words)}, {args.pipeline_schedule}"


def ranks_and_machines(
    config: Config, strategy: ConfigStrategy, num_processes: int | None, num_machines: int | None
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
            f"--num_processes {ranks} on {machines} machines: "
            "must be at least 1, and the same number on each"
        )
    if mesh and ranks != mesh:
        raise UnplannableError(misfit_of_mesh(config, ranks))
    if strategy.engine == "single" and ranks > 1:
        raise UnplannableError(
            f"the config is for one process: --num_processes {ranks} needs ddp.yaml or another"
        )
    return ranks, machines


def engine_on(strategy: ConfigStrategy, ranks: int) -> str:
    """Return the engine that runs: DDP on one rank is one plain process.

    accelerate does not wrap a model in DDP whose matrices are split.
    """
    if strategy.engine == "ddp" and (ranks == 1 or strategy.tp > 1):
        return "single"
    return strategy.engine


def name_of(plan: Plan) -> str:
    """Return the name of a strategy other than FSDP's."""
    if plan.engine == "single":
        return plan.mesh.describe("") or "one process"
    if plan.engine == "ddp":
        return plan.mesh.describe("DDP")
    return plan.mesh.describe(f"DeepSpeed ZeRO-{plan.stage}")


def with_sharding(
    plan: Plan, config: Config, strategy: ConfigStrategy, ranks_per_machine: int
) -> Plan:
    """Return the plan with FSDP's settings: how many shards, of which units, and prefetching."""
    settings = config.get("fsdp_config", {})
    shards = shards_of(plan, strategy, ranks_per_machine)
    name = f"{plan.engine.upper()} {strategy.in_force}"
    if plan.engine == "fsdp1" and shards == 1:
        name = "FSDP1 NO_SHARD"  # torch switches to it on a single rank, whatever the strategy.
    policy = settings.get("fsdp_auto_wrap_policy") or "NO_WRAP"
    wraps_layers = policy == "TRANSFORMER_BASED_WRAP"
    if not wraps_layers and (policy != "NO_WRAP" or plan.engine == "fsdp2"):
        raise UnplannableError(
            f"fsdp_auto_wrap_policy {policy}: only TRANSFORMER_BASED_WRAP can be planned"
        )
    plan = replace(plan, shards=shards)
    return replace(
        plan,
        name=plan.mesh.describe(name),
        reshards=strategy.in_force in RESHARDS,
        wraps_layers=wraps_layers,
        prefetches=settings.get("fsdp_backward_prefetch") == "BACKWARD_PRE",
    )


def shards_of(plan: Plan, strategy: ConfigStrategy, ranks_per_machine: int) -> int:
    """Return how many ranks share one copy of the state.

    FSDP1 forms groups by machine, FSDP2 by the mesh.
    """
    if plan.engine == "fsdp2" and strategy.places:
        return max(strategy.shards, 1) * strategy.cp
    if plan.engine == "fsdp2":
        return plan.ranks
    if strategy.in_force == "NO_SHARD":
        return 1
    if strategy.in_force in HYBRIDS:
        return ranks_per_machine
    return plan.ranks


def refuse_unknown_precision(plan: Plan) -> None:
    """Raise UnplannableError for a mixed precision whose bytes are not known here."""
    if plan.mixed_precision not in ("no", *ITEMSIZES):
        raise UnplannableError(
            f"mixed_precision {plan.mixed_precision}: only no, bf16 and fp16 can be planned"
        )


def refuse_unknown_keys(plan: Plan, config: Config) -> None:
    """Raise UnplannableError for keys of a config whose effect on memory is not known here."""
    if recipe.adapts_experts(plan.args):
        raise UnplannableError(
            "--lora_target_parameters: adapters of experts cannot be planned: pass it without a "
            "value. For a run with them, rehearse it: its shard report has the bytes of each rank"
        )
    fsdp = config.get("fsdp_config", {})
    if plan.is_fsdp and fsdp.get("fsdp_activation_checkpointing"):
        raise UnplannableError(
            "fsdp_activation_checkpointing: cannot be planned; "
            "use --gradient_checkpointing, which does the same"
        )
    if plan.is_fsdp and fsdp.get("fsdp_transformer_layer_cls_to_wrap"):
        raise UnplannableError(
            "fsdp_transformer_layer_cls_to_wrap: cannot be planned; "
            "without this key the model's own layers are wrapped"
        )
    zero = config.get("deepspeed_config", {})
    if plan.engine == "zero" and zero.get("deepspeed_config_file"):
        raise UnplannableError(
            "deepspeed_config_file: cannot be planned; use the keys of the YAML, "
            "which leave DeepSpeed's bucket sizes as they are"
        )


def refuse_as_the_recipe(plan: Plan, config: Config) -> None:
    """Raise UnplannableError if the recipe would refuse to start, with its reasons."""
    problems = recipe.refusals(plan, config)
    if problems:
        raise UnplannableError("; ".join(problems))
