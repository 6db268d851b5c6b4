# SPDX-License-Identifier: Apache-2.0
"""The strategy of YAML and launcher: the Accelerator, and what is really in force."""

import functools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from accelerate import (
    Accelerator,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)
from accelerate.utils import DataLoaderConfiguration, GradientAccumulationPlugin
from accelerate.utils.dataclasses import DynamoBackend, TorchDynamoPlugin

from components import upstream
from components.experts import average_under_ddp, make_expert_mesh
from components.mesh import Mesh
from components.row_attention import keep_rows_apart
from core import workarounds
from core.arguments import (
    CommonArguments,
    DenseModelArguments,
    ExpertParallelArguments,
    PipelineArguments,
)
from core.workarounds import fsdp_plugin, mixed_dtype

FSDP2_NAMES = {  # by (hybrid, reshards after the forward pass)
    (False, True): "FULL_SHARD",
    (False, False): "SHARD_GRAD_OP",
    (True, True): "HYBRID_SHARD",
    (True, False): "HYBRID_SHARD_ZERO2",
}
# The watch over the ranks reports a hang before the process group times out.
SECONDS_AFTER_THE_WATCH = 60


class PipelineAccelerator(Accelerator):
    """accelerate's Accelerator, which knows of no pipelines, with those of the arguments.

    Attributes:
        pipeline_ranks: ranks of each pipeline.
        shards_stages: whether FSDP2 shards each stage over the pipelines.
    """

    pipeline_ranks = 1
    shards_stages = False

    def describe(self) -> str:
        """Return the name of the strategy, such as "PP 2 x FSDP2 4"."""
        pipelines = self.num_processes // self.pipeline_ranks
        if pipelines == 1:
            return f"PP {self.pipeline_ranks}"
        if self.shards_stages:
            return f"PP {self.pipeline_ranks} x FSDP2 {pipelines}"
        return f"PP {self.pipeline_ranks} x replicas {pipelines}"


class ExpertAccelerator(Accelerator):
    """accelerate's Accelerator, which knows of no expert parallelism, with that of the arguments.

    Attributes:
        expert_ranks: ranks over which the experts of a layer are spread.
    """

    expert_ranks = 1

    @functools.cached_property
    def expert_mesh(self) -> Any:
        """The mesh over whose groups experts are spread."""
        return make_expert_mesh(self, self.expert_ranks)

    def prepare_model(self, model: torch.nn.Module, *args: Any, **options: Any) -> Any:
        """Prepare a model for DDP, which leaves experts to the ranks that have them."""
        upstream.leave_experts_out_of_ddp(model)
        with upstream.ddp_takes_split_weights():
            model = super().prepare_model(model, *args, **options)
        average_under_ddp(model, self.expert_mesh)
        return model


@dataclass(frozen=True)
class Strategy:
    """The strategy that accelerate really runs, whatever was requested.

    Attributes:
        name: "one process", "DDP", "FSDP2 FULL_SHARD", "DeepSpeed ZeRO-3", ...
        fsdp_version: 1 or 2; 0 without FSDP.
        zero_stage: 0 to 3; None without DeepSpeed.
        is_split: whether tensor parallelism splits the matrices, or expert parallelism spreads the
            experts.
        pipeline: ranks of a pipeline, each with other weights; 1 without pipeline parallelism.
        shards_stages: whether FSDP2 shards each stage of a pipeline.
        sharding: FSDP's part of the name, such as "FULL_SHARD"; "" without FSDP.
    """

    name: str
    fsdp_version: int = 0
    zero_stage: int | None = None
    is_split: bool = False
    pipeline: int = 1
    shards_stages: bool = False
    sharding: str = ""

    @property
    def is_sharded(self) -> bool:
        """Whether an engine that can shard is in force; FSDP's NO_SHARD and ZeRO-0 count too."""
        return self.fsdp_version > 0 or self.zero_stage is not None

    @classmethod
    def of(cls, accelerator: Accelerator) -> "Strategy":
        """Return the strategy of an Accelerator."""
        plugin = fsdp_plugin(accelerator)
        mesh = Mesh.of(accelerator)
        if plugin is not None and plugin.fsdp_version == 1:
            name = fsdp1_name(accelerator)
            return cls(f"FSDP1 {name}", fsdp_version=1, sharding=name)
        if plugin is not None:
            name = FSDP2_NAMES[mesh.dp_replicate > 1, bool(plugin.reshard_after_forward)]
            is_split = mesh.tp > 1 or mesh.ep > 1
            return cls(
                mesh.describe(f"FSDP2 {name}"), fsdp_version=2, is_split=is_split, sharding=name
            )
        zero = accelerator.state.deepspeed_plugin
        if zero is not None:
            name = f"DeepSpeed ZeRO-{zero.zero_stage}"
            return cls(mesh.describe(name), zero_stage=zero.zero_stage)
        if mesh.tp > 1:
            return cls(mesh.describe(""), is_split=True)
        if mesh.ep > 1:
            return cls(mesh.describe("DDP"), is_split=True)
        if isinstance(accelerator, PipelineAccelerator):
            return cls(
                accelerator.describe(),
                pipeline=accelerator.pipeline_ranks,
                shards_stages=accelerator.shards_stages,
            )
        return cls("one process" if accelerator.num_processes == 1 else "DDP")


def fsdp1_name(accelerator: Accelerator) -> str:
    """Return the name of the strategy that FSDP1 really runs.

    If there is one shard, torch turns every strategy into NO_SHARD (torch/distributed/fsdp/
    _init_utils.py, _init_core_state). Hybrid strategies shard over the GPUs of one host.
    """
    requested = fsdp_plugin(accelerator).sharding_strategy.name
    num_shards = accelerator.num_processes
    if requested.startswith(("_HYBRID", "HYBRID")):
        num_shards = getattr(torch, accelerator.device.type).device_count()
    return requested if num_shards > 1 else "NO_SHARD"


def compute_dtype(dtype: str, accelerator: Accelerator) -> str:
    """Return the name of the dtype of matrix products: mixed precision's, or else the weights'."""
    return mixed_dtype(accelerator) or dtype


def new_accelerator(args: CommonArguments) -> Accelerator:
    """Return the Accelerator for YAML, launcher and arguments.

    Raises:
        RuntimeError, ValueError, ImportError: if accelerate cannot run what they request.
    """
    dynamo = None
    if isinstance(args, DenseModelArguments) and args.torch_compile:
        dynamo = TorchDynamoPlugin(backend=DynamoBackend.INDUCTOR, use_regional_compilation=True)
    kind = Accelerator
    if isinstance(args, PipelineArguments):
        kind = PipelineAccelerator
    if isinstance(args, ExpertParallelArguments) and args.ep_size > 1:
        kind = ExpertAccelerator
    accelerator = kind(
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            args.gradient_accumulation_steps, sync_with_dataloader=False
        ),
        dataloader_config=DataLoaderConfiguration(even_batches=False, non_blocking=True),
        dynamo_plugin=dynamo,
        kwargs_handlers=[
            # Otherwise DDP would hold the gradients twice, in the weights and in its buckets.
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            InitProcessGroupKwargs(timeout=timeout_of_groups(args.ddp_timeout)),
        ],
        log_with=None if args.report_to == "none" else args.report_to,
        project_dir=args.output_dir,
    )
    if isinstance(args, PipelineArguments) and isinstance(accelerator, PipelineAccelerator):
        accelerator.pipeline_ranks = args.pp_size
        accelerator.shards_stages = args.shard_stages
    if isinstance(args, ExpertParallelArguments) and isinstance(accelerator, ExpertAccelerator):
        accelerator.expert_ranks = args.ep_size
    return accelerator


def timeout_of_groups(ddp_timeout: int) -> timedelta:
    """Return how long the ranks of a process group wait for each other."""
    return timedelta(seconds=max(ddp_timeout, 1) + SECONDS_AFTER_THE_WATCH)


def set_up_engine(args: CommonArguments, accelerator: Accelerator) -> None:
    """Set what accelerate does not pass on to the engine, and the precision of matrix products."""
    workarounds.reduce_each_micro_batch(accelerator)
    workarounds.reduce_in_fp32(accelerator)
    upstream.leave_whole_weights_to_fsdp(accelerator)
    workarounds.configure_deepspeed_for_loop(
        accelerator, args.max_grad_norm, args.per_device_train_batch_size
    )
    upstream.let_batches_differ_in_size(accelerator)
    keep_rows_apart(accelerator)
    torch.set_float32_matmul_precision("high" if args.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = args.tf32  # For convolutions torch allows it by default.


def backward_of_sum(accelerator: Accelerator, loss: torch.Tensor) -> None:
    """Back-propagate this micro-batch's part of a loss that is a sum over the optimizer step.

    Engines average gradients over ranks, and accelerate divides the loss by the accumulation
    steps. Both are undone here, so that gradients add up to those of the whole step's loss.

    Args:
        loss: the micro-batch's sum, divided by the count of the whole step over all ranks.
    """
    zero_stage = Strategy.of(accelerator).zero_stage
    averaged = Mesh.of(accelerator).averaged(zero_stage)
    num_parts = accelerator.gradient_accumulation_steps * averaged
    # An infinite loss may have finite gradients. As NaN they spread to all ranks, which share the
    # gradient, and so all of them leave the step out. Nothing here waits for the device.
    nan_unless_finite = 0 * loss.detach()
    accelerator.backward(loss * (num_parts + nan_unless_finite))
