# SPDX-License-Identifier: Apache-2.0
"""What determines memory: a call of plan_memory.py, and what an accelerate config makes of it."""

import contextlib
import importlib
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from config_strategy import strategy_of
from core import loss
from core.cli import Parser, find_conflicts, parse, with_extras, with_files_read
from core.engine import Layout, find_faults_of_dtypes
from core.exits import End, Exit
from core.extras import hooks
from core.model import read_config
from extras.mesh.layout import MeshLayout

# Recipes whose step is known here: causal language models, and pairs of their answers
RECIPES = ("llama", "mixtral", "mistral_pretrain", "llama_dpo")
GB = 10**9
GIB = 2**30
# GiB that torch reports as a card's total capacity in the out-of-memory messages of public issues,
# which is less than what is printed on the box
CARDS = {
    "t4": 14.6,
    "v100": 15.7,
    "v100-32gb": 31.7,
    "3090": 23.6,
    "4090": 23.5,
    "5090": 31.3,
    "l4": 22.0,
    "a10g": 22.0,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40gb": 39.4,
    "a100": 79.1,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.3,
    "mi300x": 191.6,
}
USUAL_CARD = 80 * GIB  # if none is named, the loss is computed in pieces as on this one
# Memory that no tensor holds. Each number is an assumption, at the upper end of public reports.
CONTEXT = 0.8 * GIB  # CUDA's context and the kernels that are loaded into it
COMMUNICATOR = 0.5 * GIB  # NCCL's buffers, once there are several ranks
ROUNDING = 0.05  # share of all tensors that the allocator rounds up or cannot reuse
REHEARSE = "rehearse it: its shard report has the bytes of each rank"
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}  # what mixed precision computes in


# ---- A call ----
@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank, at its worst: all lines are as long as the longest.

    Attributes:
        lines: of one row each, unless they are packed; a pair has two.
        length: tokens of a line.
        supervised: tokens, of all lines together, that the loss counts.
        is_packed: whether several rows, which must not see each other, share a line.
    """

    lines: int
    length: int
    supervised: int
    is_packed: bool = False

    def part(self, parts: int) -> "Batch":
        """Return what the fullest of several ranks has that share each line."""
        length = -(-self.length // parts)
        supervised = min(self.supervised, self.lines * length)
        return replace(self, length=length, supervised=supervised)


@dataclass(frozen=True)
class Request:
    """What the user asks; plan_memory.py explains each field."""

    model: str = ""  # recipes/llama.py, or in its place a hub id, a folder or a config.json
    words: list[str] = field(default_factory=list)  # the recipe's own arguments
    config_file: str | None = None  # none: choose among the shipped ones
    mesh: dict[str, Any] = field(default_factory=dict)  # keys that replace those of the config
    num_processes: int | None = None
    num_machines: int | None = None
    mixed_precision: str | None = None
    gpu: str | None = None  # a name or a size, as `bytes_of_card` reads it

    @property
    def ranks(self) -> int:
        """Processes, one per GPU, where no config says their number: by default one per host."""
        return self.num_processes or self.num_machines or 1

    @property
    def given(self) -> set[str]:
        """The names of the recipe's arguments that the user gave."""
        flags = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        return {flag.removeprefix("--").replace("-", "_") for flag in flags}


# ---- What is trained ----
def read_arguments(request: Request) -> tuple[Any, Request]:
    """Return the recipe's arguments, and the request with all words that they come from.

    The words of a `--config` take its place. The recipe derives --max_logits_mib from the GPU that
    it finds; here that is the card that is planned for. Raises End for what cannot be planned.
    """
    words = request.words
    name = "llama"
    model = Path(request.model)
    if model.suffix == ".py":
        name = model.stem
    elif model.name == "config.json" and model.is_file():
        words = ["--model_name_or_path", str(model.parent), *words]
    else:
        words = ["--model_name_or_path", request.model, *words]
    if name not in RECIPES:
        raise End(
            Exit.USAGE,
            f"{request.model}: only the steps of {', '.join(RECIPES)} are traced: {REHEARSE}",
        )
    recipe = importlib.import_module(name)
    words = with_files_read(Parser(with_extras(recipe.Arguments)), words)
    args = parse(recipe.Arguments, words=words)
    read_config(args)  # ends here if there is none
    if args.max_logits_mib is None:
        args.max_logits_mib = logits_mib_on(bytes_of_card(request.gpu) or USUAL_CARD)
    return args, replace(request, words=words)


def logits_mib_on(card: float) -> float:
    """Return how many MiB of fp32 logits a recipe computes at a time, by default, on a card."""
    return loss.LOGITS_SHARE * card / 2**20


def batch_of(args: Any) -> Batch:
    """Return the largest micro-batch of a recipe's arguments."""
    lines = args.per_device_train_batch_size * (2 if hasattr(args, "beta") else 1)
    is_filled = getattr(args, "packing", False) or type(args).__module__ == "mistral_pretrain"
    is_packed = is_filled or getattr(args, "padding_free", False)
    return Batch(lines, args.max_length, lines * args.max_length, is_packed)


# ---- Cards ----
def bytes_of_card(card: str | None) -> int | None:
    """Return the bytes of a card: a name of CARDS, or a size such as 24GB (10^9) or 24GiB (2^30).

    Returns None for no card. Raises End for anything else.
    """
    if card is None:
        return None
    name = card.lower().replace("rtx", "").strip(" -_")
    if name in CARDS:
        return int(CARDS[name] * GIB)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", name)
    if size is None:
        known = ", ".join(CARDS)
        raise End(Exit.USAGE, f"--gpu {card}: neither a size such as 24GB nor one of {known}")
    unit = GIB if size[2] == "gib" else GB
    return int(float(size[1]) * unit)


def with_constants(device: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Return what a device holds, {category: bytes}, with "constants" for all but tensors."""
    constants = CONTEXT + ROUNDING * sum(device.values())
    if ranks > 1:
        constants += COMMUNICATOR
    return {**device, "constants": round(constants)}


# ---- The plan ----
@dataclass(frozen=True)
class Plan:
    """What determines memory. By default it is one plain process in fp32.

    Attributes:
        args: of the recipe.
        engine: single, ddp, fsdp1, fsdp2 or zero; stage is that of ZeRO.
        shards: ranks that share one copy of the state, under TP of what a rank has of it.
        reshards: FSDP: whether parameters are freed between forward and backward pass.
        mixed_precision: no, bf16 or fp16.
        prefetches: FSDP1: BACKWARD_PRE, gather the next unit while one is computed.
        tp, cp, sp: ranks that share matrices, and the tokens of a row by a ring or by heads.
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
    prefetches: bool = False
    tp: int = 1
    cp: int = 1
    sp: int = 1

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
    def casts_to(self) -> torch.dtype | None:
        """What the engine casts the weights to that the model computes with, if it does."""
        return self.low if self.engine in ("fsdp1", "fsdp2", "zero") else None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """What autocast computes in; DeepSpeed casts the model instead."""
        return None if self.engine == "zero" else self.low


def plan_of(
    args: Any,
    config: Any,
    num_processes: int | None = None,
    num_machines: int | None = None,
    mixed_precision: str | None = None,
) -> Plan:
    """Return the Plan of a recipe's arguments under an accelerate config, as it is read.

    The numbers and the precision are those of the launcher's command line, None for the config's.
    Raises End for what the recipe would refuse, for ranks that the config cannot run on, and for
    keys whose effect on memory is not known here.
    """
    strategy = strategy_of(config)
    mesh = strategy.places
    ranks = num_processes or max(config.number("num_processes", 1), mesh)
    machines = num_machines or config.machines
    engine = strategy.engine
    if mesh and ranks != mesh:
        raise End(Exit.USAGE, f"the config's mesh needs {mesh} ranks, not {ranks}: launch {mesh}")
    if engine == "single" and ranks > 1:
        raise End(Exit.USAGE, f"the config is for one process: {ranks} need ddp.yaml or another")
    if engine == "ddp" and (ranks == 1 or strategy.tp > 1):
        engine = "single"  # accelerate wraps no model in DDP whose matrices are split.
    shards = ranks // strategy.tp
    if engine.startswith("fsdp"):
        shards = strategy.shards_on(ranks, ranks // machines)
    offload = set(strategy.offload)
    plan = Plan(
        args,
        engine=engine,
        stage=strategy.stage or 0,
        ranks=ranks,
        shards=shards,
        reshards=strategy.in_force in ("FULL_SHARD", "HYBRID_SHARD"),
        mixed_precision=mixed_precision or config.text("mixed_precision", "no"),
        offloads_parameters=bool({"fsdp_offload_params", "offload_param_device"} & offload),
        offloads_optimizer=bool({"fsdp_offload_params", "offload_optimizer_device"} & offload),
        prefetches=config.text("fsdp_backward_prefetch") == "BACKWARD_PRE",
        tp=strategy.tp,
        cp=strategy.cp,
        sp=strategy.sp,
    )
    problems = [*find_unplanned(plan, config), *find_problems(plan)]
    if problems:
        raise End(Exit.USAGE, "; ".join(problems))
    return plan


# ---- Refusals ----
def find_unplanned(plan: Plan, config: Any) -> Iterator[str]:
    """Yield what this planner does not know the memory of."""
    args = plan.args
    if config.json is not None:
        yield "deepspeed_config_file: cannot be planned; use the keys of the YAML"
    if plan.engine.startswith("fsdp"):
        if config.text("fsdp_auto_wrap_policy") != "TRANSFORMER_BASED_WRAP":
            yield "fsdp_auto_wrap_policy: only TRANSFORMER_BASED_WRAP can be planned"
        for key in ("fsdp_activation_checkpointing", "fsdp_transformer_layer_cls_to_wrap"):
            if config.values.get(key):
                yield f"{key}: cannot be planned"
    if getattr(args, "ep_size", 1) > 1:
        yield f"--ep_size: how many tokens arrive at a rank's experts is not traced: {REHEARSE}"


def find_problems(plan: Plan) -> Iterator[str]:
    """Yield why the recipe or an engine would refuse to start."""
    args = plan.args
    yield from find_conflicts(args)
    if plan.engine.startswith("fsdp") and getattr(args, "load_in_8bit", False):
        yield "FSDP cannot shard int8 weights"
    if args.optim.endswith("bit") and plan.engine in ("fsdp1", "fsdp2", "zero"):
        yield f"--optim {args.optim} cannot hold shards"
    if plan.cp > 1 and (getattr(args, "packing", False) or getattr(args, "padding_free", False)):
        yield "--packing, --padding_free: rows of one line would see each other in a ring"
    accelerator = stand_in(plan)
    yield from find_faults_of_dtypes(args, accelerator)
    layout = Layout(accelerator)
    if plan.copies > 1:
        layout = MeshLayout(accelerator, {"cp": plan.cp, "sp": plan.sp, "tp": plan.tp})
    known = [name for name in args.EXTRAS if name in ("mesh", "experts", "float8")]
    for hook in hooks(known, "find_faults"):
        yield from hook(args, layout)


# ---- The first rank ----
def stand_in(plan: Plan, mesh: Any = None) -> Any:
    """Return what the recipes ask of the first rank's Accelerator.

    Args:
        mesh: torch's mesh of the ranks that share rows or matrices, or None.
    """
    state = SimpleNamespace(fsdp_plugin=None, deepspeed_plugin=None)
    kind = DistributedType.NO
    if plan.engine.startswith("fsdp"):
        kind = DistributedType.FSDP
        state.fsdp_plugin = SimpleNamespace(
            fsdp_version=int(plan.engine[-1]),
            sharding_strategy=SimpleNamespace(name="FULL_SHARD"),
            reshard_after_forward=plan.reshards,
            use_orig_params=True,
            cpu_ram_efficient_loading=False,
            ignored_modules=None,
            cpu_offload=None,
        )
        if plan.offloads_parameters:
            state.fsdp_plugin.cpu_offload = CPUOffloadPolicy()
    if plan.engine == "zero":
        state.deepspeed_plugin = SimpleNamespace(zero_stage=plan.stage, deepspeed_config={})
    parallelism = SimpleNamespace(
        dp_replicate_size=plan.replicas if plan.engine == "fsdp2" else 1,
        cp_size=plan.cp,
        sp_size=plan.sp,
        tp_size=plan.tp,
        sp_handler=None,
    )
    return SimpleNamespace(
        distributed_type=kind,
        num_processes=plan.ranks,
        process_index=0,
        is_main_process=True,
        is_fsdp2=plan.engine == "fsdp2",
        native_amp=plan.autocast_dtype is not None,
        mixed_precision=plan.mixed_precision,
        device=torch.device("cpu"),
        torch_device_mesh=mesh,
        parallelism_config=parallelism,
        state=state,
    )


@contextlib.contextmanager
def first_rank(plan: Plan) -> Generator[Layout]:
    """Yield the layout of the first rank; the others are there in name only.

    The ranks that share a row by its heads are left out: each has an equal part of the tokens.
    """
    if plan.tp * plan.cp == 1:
        yield Layout(stand_in(plan))
        return
    dist.init_process_group("fake", rank=0, world_size=plan.tp * plan.cp, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (plan.cp, plan.tp), mesh_dim_names=("cp", "tp"))
        yield MeshLayout(stand_in(plan, mesh), {"cp": plan.cp, "tp": plan.tp})
    finally:
        dist.destroy_process_group()
        # DTensor remembers what it did on a mesh, and takes an equal mesh for the same one.
        _clear_sharding_prop_cache()
