# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallel training: torch's schedules own forward and backward pass of a batch.

accelerate has no part in it but process groups and devices. Gradients of replicas are added up
here, since DistributedDataParallel fails in the second micro-batch (torch 2.13, reducer.cpp, line
2003), and shards are FSDP2's, within each stage.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from core.loss import LossInHead
from core.workarounds import mixed_dtype
from extras.pipeline.batches import micro_batches_of
from extras.pipeline.layout import PipelineLayout
from extras.pipeline.schedules import ScheduleMaker, Shape
from extras.pipeline.stages import Stage, view_of


class StageModule(torch.nn.Module):
    """The module of a stage: tokens or hidden states in, hidden states or the loss out.

    A schedule gives a stage the micro-batches of a batch in their order. What else belongs to them
    waits in `micro_batches`.
    """

    def __init__(
        self,
        stage: Stage,
        part: Any,
        token_loss: LossInHead | None,
        accelerator: Accelerator,
        dtype: torch.dtype,
    ) -> None:
        """Make the module of a stage.

        Args:
            part: the model with the modules of this rank.
            token_loss: the loss, which only the last stage computes.
            dtype: of the hidden states between stages.
        """
        super().__init__()
        self.view = view_of(part, stage)
        self.micro_batches: Iterator[dict[str, Any]] = iter(())
        self._input = "input_ids"
        if not stage.is_first:
            self._input = "inputs_embeds"
        self._token_loss = None
        if stage.is_last:
            self._token_loss = token_loss
        self._accelerator = accelerator
        self._dtype = dtype

    def forward(self, received: torch.Tensor) -> torch.Tensor:
        """Return hidden states, [rows, tokens, features], or the sum of the losses of the tokens.

        Args:
            received: tokens, [rows, tokens], or the hidden states of the stage before.
        """
        micro_batch = next(self.micro_batches)
        inputs = {self._input: received, **micro_batch["inputs"]}
        with self._accelerator.autocast():
            if self._token_loss is None:
                hidden = self.view.model(**inputs, use_cache=False).last_hidden_state
                return hidden.to(self._dtype)
            return self._token_loss(self.view, {**micro_batch, "inputs": inputs})


class Pipeline:
    """The stages of this rank, and the schedule that runs them with those of the other ranks.

    Create it before the optimizer, since it shards the weights if requested.

    Attributes:
        model: the part of the model on this rank.
        layout: the place of this rank.
        stages: those of this rank.
        is_sharded: whether the pipelines share the weights of their stages.
    """

    def __init__(
        self,
        args: Any,
        layout: PipelineLayout,
        stages: Sequence[Stage],
        model: Any,
    ) -> None:
        """Make the stages of this rank.

        Args:
            stages: those of this rank.
            model: the part of this rank, with its weights.
        """
        self.model = model
        self.layout = layout
        self.stages = stages
        accelerator = layout.accelerator
        self._has_first = stages[0].is_first
        self._has_last = stages[-1].is_last
        self.is_sharded = args.shard_stages and layout.num_pipelines > 1
        # FSDP2 divides gradients by the number of ranks that share the weights
        self._averaged = layout.num_pipelines if self.is_sharded else 1
        precision = mixed_dtype(accelerator) if self.is_sharded else None
        dtype = getattr(torch, precision) if precision else model.dtype
        token_loss = None
        if self._has_last:
            # EDIT: another loss of a token is one line of token_losses in core/loss.py
            token_loss = LossInHead(model, args.max_logits_mib, accelerator.device)
        self._stages: dict[int, StageModule] = {}
        for stage in stages:
            module = StageModule(stage, model, token_loss, accelerator, dtype)
            if self.is_sharded:
                shard(module, layout.over_pipelines, precision)
            self._stages[stage.index] = module
        self._schedules = ScheduleMaker(
            args.pipeline_schedule,
            self._stages,
            num_stages=layout.num_ranks * len(stages),
            hidden=torch.empty(model.config.hidden_size, dtype=dtype, device="meta"),
            device=accelerator.device,
            group=layout.over_stages,
            loss=self._part_of_loss,
        )
        self._made_for: tuple[Shape, bool] | None = None
        self._schedule: Any = None

    def train(self, is_training: bool = True) -> None:
        """Turn on what is only done in training, such as dropout, or turn it off."""
        for stage in self._stages.values():
            stage.train(is_training)

    def eval(self) -> None:
        """Turn off what is only done in training."""
        self.train(False)

    # ---- Forward and backward ----
    def step(self, batch: Mapping[str, Any], count: torch.Tensor) -> torch.Tensor:
        """Run forward and backward pass of a batch, and return this rank's part of the loss.

        Args:
            batch: as PipelineCollator makes it, the same on all ranks of a pipeline.
            count: by which the sum of the losses of the tokens is divided.
        """
        schedule = self._schedule_for(batch, is_training=True)
        return self._run(schedule.step, batch, count)

    @torch.no_grad()
    def evaluate(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return this rank's part of the summed losses of the tokens of a batch."""
        schedule = self._schedule_for(batch, is_training=False)
        loss = self._run(schedule.eval, batch, torch.ones((), device=self.layout.device))
        for stage in self._stages.values():
            for module in stage.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # Without a backward pass the weights stay whole
        return loss

    def _schedule_for(self, batch: Mapping[str, Any], is_training: bool) -> Any:
        """Return the schedule for batches of this shape; only the newest one is kept."""
        num_rows, width = batch["inputs"]["input_ids"].shape
        num_microbatches = len(batch["targets"])
        shape = Shape(num_rows // num_microbatches, width, num_microbatches)
        if (shape, is_training) != self._made_for:
            self._made_for = (shape, is_training)
            self._schedule = self._schedules.make(shape, is_training)
        return self._schedule

    def _run(
        self, run_schedule: Callable[..., Any], batch: Mapping[str, Any], count: torch.Tensor
    ) -> torch.Tensor:
        """Have a schedule run a batch; return the loss on the rank that has it, 0 elsewhere.

        Args:
            run_schedule: its step or eval. The rank of the first stage gives it the tokens, and
                that of the last one what `_part_of_loss` is called with.
            count: by which the sum of the losses of the tokens is divided.
        """
        for stage in self._stages.values():
            stage.micro_batches = micro_batches_of(batch)
        tokens = batch["inputs"]["input_ids"]
        losses: list[torch.Tensor] = []
        given = []
        wanted: dict[str, Any] = {}
        if self._has_first:
            given.append(tokens)
        if self._has_last:
            counts = count.expand(len(batch["targets"]))  # one for each micro-batch
            wanted = {"target": counts, "losses": losses}
        run_schedule(*given, return_outputs=False, **wanted)
        if not self._has_last:
            return torch.zeros((), device=tokens.device)
        return torch.stack(losses).sum().detach() / self._averaged

    def _part_of_loss(self, loss: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        """Return the part of a micro-batch in the loss of the step.

        FSDP2 averages gradients, which is undone here. An infinite loss may have finite gradients.
        As NaN they spread to all ranks, as in `backward_of_sum` of core/engine.py.

        Args:
            loss: the sum of the losses of the tokens of a micro-batch.
            count: by which it is divided, [1].
        """
        nan_unless_finite = 0 * loss.detach()
        return loss / count.squeeze() * (self._averaged + nan_unless_finite)

    # ---- Gradients ----
    def reduce_gradients(self) -> None:
        """Add up the gradients of weights that several ranks have. Every rank takes part.

        FSDP2 has already done so for what it shards.
        """
        waiting = []
        if self.layout.num_pipelines > 1 and not self.is_sharded:
            group = self.layout.over_pipelines.get_group()
            for gradient in self._gradients():
                waiting.append(dist.all_reduce(gradient, group=group, async_op=True))
        for work in waiting:
            work.wait()
        if self._shares_embedding():
            weight = self.model.get_input_embeddings().weight
            dist.all_reduce(local(weight.grad), group=self.layout.ends)

    def clip_gradients(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients so that their norm over all stages is at most this; return the norm.

        Every rank takes part.
        """
        counted = [weight.grad for weight in self.model.parameters() if weight.grad is not None]
        if self._shares_embedding() and self.layout.rank > 0:  # The first rank counts it.
            embedding = self.model.get_input_embeddings().weight
            counted = [gradient for gradient in counted if gradient is not embedding.grad]
        norm: Any = torch.nn.utils.get_total_norm(counted)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        norm = self.layout.sum_over_stages(norm**2).sqrt()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in self._gradients():
            gradient.mul_(scale)
        return norm

    def _gradients(self) -> list[torch.Tensor]:
        """Return what this rank has of each gradient, in the order of the weights."""
        found = []
        for weight in self.model.parameters():
            if weight.grad is not None:
                found.append(local(weight.grad))
        return found

    def _shares_embedding(self) -> bool:
        """Return whether this rank and another one have the weight of the embedding."""
        is_one_end = self._has_first != self._has_last
        return self.model.config.tie_word_embeddings and is_one_end


def local(tensor: Any) -> torch.Tensor:
    """Return what this rank has of a tensor that may be sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def shard(stage: StageModule, pipelines: DeviceMesh, dtype: str | None) -> None:
    """Shard the weights of a stage over the pipelines.

    They stay whole from the forward pass to the backward pass, or else each micro-batch would
    gather them twice.

    Args:
        pipelines: the ranks that have the same stage.
        dtype: of mixed precision, or None.
    """
    precision = MixedPrecisionPolicy()
    if dtype is not None:
        precision = MixedPrecisionPolicy(getattr(torch, dtype), torch.float32)
    for layer in stage.view.model.layers:
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=pipelines, mp_policy=precision, reshard_after_forward=False)
    fully_shard(stage, mesh=pipelines, mp_policy=precision, reshard_after_forward=False)
