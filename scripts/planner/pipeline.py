# SPDX-License-Identifier: Apache-2.0
"""What each rank of recipes/llama_pipeline.py holds: its stages, and the micro-batches in flight.

    peaks = peaks_of_ranks(plan, config, batch)
    holders = holders_of_weights(plan, config)

Ranks differ: the first has the embedding, the last the head and the logits, and the earlier a rank
is in a pipeline, the more micro-batches it keeps. So each is planned by itself, and the plan of the
whole is that of the fullest. Stages and schedules are in stages.py, the ops of layers in blocks.py.

Ranks with the same stages share them in one of two ways: replicas, whose gradients are added up in
place, or FSDP2 within the stages (--shard_stages), where a stage stays whole from its first forward
pass to its last backward pass, and so do its gradients.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from . import recipe
from .autograd import FP32, Autograd, Tensor, Weight
from .blocks import EMBEDDING, TAIL, TOKEN_IDS, Forward, Part
from .closed_form import (
    MICRO_BATCHES,
    Build,
    Weights,
    distinct_parameters,
    evaluation_batch_of,
    share_of_checkpoint,
)
from .decoder import Decoder, Layer, read_decoder
from .fsdp import Fsdp2
from .ledger import Ledger, Sizes, Storage
from .plan import Plan
from .ranks import Replica, Unit
from .recipe import Stage, StagesArguments
from .request import Batch
from .shapes import build_base, layers_of
from .stages import Place, SizedStage, run_batch, schedule_of


@dataclass(frozen=True)
class RankPeak:
    """What a rank of a pipeline holds at its peak.

    Attributes:
        rank: its place in the pipeline.
        stages: those that it has.
        device: {category: bytes}.
        host: {category: bytes}.
    """

    rank: int
    stages: Sequence[Stage]
    device: Sizes
    host: Sizes

    @property
    def bytes(self) -> int:
        """All bytes on the device."""
        return sum(self.device.values())

    def describe(self) -> str:
        """Return what the rank has, such as "embedding, layers 0-3, head"."""
        parts = []
        for stage in self.stages:
            if stage.is_first:
                parts.append("embedding")
            parts.append(numbers_of(stage.layers))
            if stage.is_last:
                parts.append("head")
        return ", ".join(parts)


def fullest(peaks: Sequence[RankPeak]) -> RankPeak:
    """Return the rank that holds the most."""
    return max(peaks, key=lambda peak: peak.bytes)


def numbers_of(layers: range) -> str:
    """Return the numbers of a stage's layers in words."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {layers[0]}-{layers[-1]}"


def peaks_of_ranks(
    plan: Plan, config: PretrainedConfig, batch: Batch, build: Build = build_base
) -> list[RankPeak]:
    """Return what each rank of a pipeline holds at its peak, in order.

    Args:
        batch: all that goes through a pipeline at a time.
        build: makes the model on the meta device.
    """
    return [rank.peak(batch) for rank in planned_ranks(plan, config, build(plan.args, config))]


def holders_of_weights(
    plan: Plan, config: PretrainedConfig, build: Build = build_base
) -> list[list[int]]:
    """Return the ranks of the run that have a weight, for each weight of the model in its order.

    Ranks with the same place in different pipelines are neighbors (extras/pipeline/layout.py).

    Args:
        build: makes the model on the meta device.
    """
    model = build(plan.args, config)
    pipelines = plan.ranks // plan.pp
    holders: list[list[int]] = [[] for _ in distinct_parameters(model)]
    for place, rank in enumerate(planned_ranks(plan, config, model)):
        of_place = range(place * pipelines, (place + 1) * pipelines)
        for ranks, parameter in zip(holders, distinct_parameters(model), strict=True):
            if rank.has(parameter):
                ranks += of_place
    return holders


def planned_ranks(
    plan: Plan, config: PretrainedConfig, model: PreTrainedModel
) -> list["PlannedRank"]:
    """Return the ranks of a pipeline, in order.

    Args:
        model: whole, on the meta device.
    """
    assert isinstance(plan.args, StagesArguments)
    stages = recipe.stages_of(plan.args, config)
    return [PlannedRank(plan, plan.args, place, stages, model, config) for place in range(plan.pp)]


class PlannedRank:
    """A rank of a pipeline.

    Args:
        rank: its place in the pipeline.
        stages: all of the pipeline.
        model: whole, on the meta device.
    """

    def __init__(
        self,
        plan: Plan,
        args: StagesArguments,
        rank: int,
        stages: Sequence[Stage],
        model: PreTrainedModel,
        config: PretrainedConfig,
    ) -> None:
        self.plan = plan
        self.args = args
        self.rank = rank
        self.num_stages = len(stages)
        self.stages = [stages[number] for number in recipe.stages_of_rank(args, rank)]
        self.weights = Weights(plan, model)
        self.decoder = read_decoder(model, config, self.weights.of)
        roots: dict[Part, list[Weight]] = {}
        for stage in self.stages:
            roots[name_of_root(stage.index)] = self.root_of(stage)
        layers: dict[Part, list[Weight]] = {
            layer: self.weights.of_module(module)
            for layer, module in zip(self.decoder.layers, layers_of(model), strict=True)
        }
        own = {layer: layers[layer] for stage in self.stages for layer in self.layers_of(stage)}
        held = list(dict.fromkeys(flatten([*roots.values(), *own.values()])))
        self.strategy: Replica = Replica(plan, held, {})
        if plan.is_fsdp:
            self.strategy = ShardedStages(plan, held, roots | own, self.parts())

    def has(self, parameter: torch.nn.Parameter) -> bool:
        """Return whether the rank has a parameter of the model."""
        return self.weights.of(parameter) in self.strategy.weights

    def layers_of(self, stage: Stage) -> list[Layer]:
        """Return the layers of a stage."""
        return [self.decoder.layers[number] for number in stage.layers]

    def root_of(self, stage: Stage) -> list[Weight]:
        """Return the weights of a stage outside its layers.

        If embedding and head share their weight, the last stage has it too.
        """
        decoder = self.decoder
        root = []
        if stage.is_first:
            root.append(decoder.embedding)
        if stage.is_last:
            root += [decoder.head.weight, decoder.norm.weight]
        return root

    def parts(self) -> dict[int, list[Part]]:
        """Return the units of each stage: its root, and its layers."""
        parts: dict[int, list[Part]] = {}
        for stage in self.stages:
            parts[stage.index] = [name_of_root(stage.index), *self.layers_of(stage)]
        return parts

    # ---- A step ----
    def peak(self, batch: Batch) -> RankPeak:
        """Return what the rank holds at its peak."""
        device, host = self.strategy.at_rest()
        if self.args.async_save:
            host["checkpoint"] = share_of_checkpoint(self.plan, self.strategy)
        ledger = Ledger()
        for category, size in device.items():
            ledger.add(category, size)
        autograd = Autograd(ledger, self.plan.autocast_itemsize)
        self.strategy.begin(autograd)
        self.train(autograd, batch)
        if self.args.eval_strategy != "no":
            self.evaluate(autograd, evaluation_batch_of(self.args, batch))
        return RankPeak(self.rank, self.stages, ledger.at_peak, host)

    def train(self, autograd: Autograd, batch: Batch) -> None:
        """Run one optimizer step."""
        schedule = self.schedule(autograd, batch)
        batches = min(self.args.gradient_accumulation_steps, MICRO_BATCHES)
        for index in range(batches):
            self.strategy.begin_pass(is_last=index == batches - 1)
            run_batch(schedule, self.number, is_training=True)
            self.strategy.end_pass()
        self.strategy.step()

    def evaluate(self, autograd: Autograd, batch: Batch) -> None:
        """Run a batch of evaluation, filled up to whole micro-batches."""
        filled_up = batch.sequences + -batch.sequences % self.number
        schedule = self.schedule(autograd, replace(batch, sequences=filled_up))
        if len(self.stages) > 1:
            recipe.run_only_forward(schedule)
        self.strategy.begin_pass(is_last=True)
        with torch.no_grad():
            run_batch(schedule, self.number, is_training=False)

    @property
    def number(self) -> int:
        """Micro-batches of a batch."""
        return recipe.microbatches_of(self.args)

    def schedule(self, autograd: Autograd, batch: Batch) -> Any:
        """Return torch's schedule for batches of a size, with the stages of this rank."""
        part = replace(
            batch,
            sequences=batch.sequences // self.number,
            supervised=math.ceil(batch.supervised / self.number),
        )
        tokens = part.sequences * part.length
        message = (tokens * self.decoder.hidden, self.decoder.embedding.itemsize)
        sized = []
        for stage in self.stages:
            decoder = replace(self.decoder, layers=self.layers_of(stage))
            forward = StageForward(stage, autograd, decoder, part, self.plan, self.strategy)
            place = Place(stage.index, self.num_stages, self.rank, self.plan.pp)
            sized.append(SizedStage(place, autograd, self.strategy, forward.run_stage, message))
        return schedule_of(recipe.class_of_schedule(self.args), sized, self.number)


def name_of_root(stage: int) -> str:
    """Return the name of what a stage has besides its layers, as a unit of FSDP2."""
    return f"root of stage {stage}"


def flatten(lists: Sequence[Sequence[Weight]]) -> list[Weight]:
    """Return the weights of several lists in one."""
    return [weight for weights in lists for weight in weights]


class StageForward(Forward):
    """The forward pass of a stage over a micro-batch."""

    def __init__(
        self,
        stage: Stage,
        autograd: Autograd,
        decoder: Decoder,
        batch: Batch,
        plan: Plan,
        strategy: Replica,
    ) -> None:
        super().__init__(autograd, decoder, batch, plan, strategy.around)
        self.stage = stage
        self.strategy = strategy

    def run_stage(self, received: Tensor | None) -> tuple[Tensor, tuple[Storage | None, ...]]:
        """Return hidden states or the loss, and what the graph holds besides its ops.

        Args:
            received: hidden states; None in the first stage.
        """
        if isinstance(self.strategy, ShardedStages):
            self.strategy.gather_root(self.stage.index)
        cosine_and_sine = self.rotary_table()
        mask = self.shared_mask()
        x = received or self.around(EMBEDDING, self.embed, TOKEN_IDS)
        for layer in self.decoder.layers:
            x = self.around(layer, partial(self.layer, layer), x)
        if self.stage.is_last:
            x = self.around(TAIL, self.tail, x)
        self.strategy.end_forward()
        self.autograd.end_autocast()
        if self.args.gradient_checkpointing:  # Recomputed layers need the mask again.
            return x, (cosine_and_sine, mask)
        return x, (cosine_and_sine,)


class ShardedStages(Fsdp2):
    """FSDP2 within the stages of a rank.

    Weights are gathered at the first forward pass of a batch, or where the schedule says so, and
    stay whole until its last backward pass. Gradients add up whole, and are reduced at its end,
    unit after unit.

    Args:
        parts: the keys of the units of each stage, its root first.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Sequence[Weight],
        units: dict[Part, list[Weight]],
        parts: dict[int, list[Part]],
    ) -> None:
        super().__init__(plan, weights, {}, units, gathers_tail_first=False)
        self.parts = parts
        # Gradients in the precision of the backward pass, which are not added up yet
        self.waiting: dict[Weight, Storage] = {}

    def units_of(self, stage: int) -> list[Unit]:
        """Return the units of a stage that have weights, the root first."""
        return [self.units[part] for part in self.parts[stage] if part in self.units]

    def gather_root(self, stage: int) -> None:
        """Gather what a stage has besides its layers."""
        root = self.units.get(name_of_root(stage))
        if root is not None:
            self.gather(root)

    def around(self, part: Part, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return forward(x), with the weights of a layer gathered before it."""
        if isinstance(part, Layer):
            unit = self.units[part]
            self.gather(unit)
            x = self.adding_up_after(unit, x)
        return Replica.around(self, part, forward, x)

    def accumulate(self, weight: Weight, gradient: Storage) -> None:
        """Add a gradient to the whole one of its weight, or have it wait until that is done."""
        whole = self.unit_of[weight].whole_gradients
        if self.plan.low_itemsize is not None:
            whole = self.waiting
        if weight not in whole:
            whole[weight] = gradient.becomes("unsharded")

    def add_up(self, unit: Unit) -> None:
        """Add the gradients that wait to those of the unit in fp32.

        FSDP2 does so where the backward pass of a unit reaches its input. The second part of a
        backward pass in two does not, so that its gradients wait for the next one.
        """
        for weight in unit.weights:
            if weight not in self.waiting:
                continue
            if weight not in unit.whole_gradients:
                unit.whole_gradients[weight] = self.autograd.new(weight.numel, FP32, "unsharded")
            del self.waiting[weight]

    def add_up_root(self, stage: int) -> None:
        """Add up the gradients of what a stage has besides its layers."""
        root = self.units.get(name_of_root(stage))
        if root is not None:
            self.add_up(root)

    def adding_up_after(self, unit: Unit, x: Tensor) -> Tensor:
        """Return x with a node that adds up a unit's gradients at the end of its backward pass."""
        x = self.autograd.op(x.numel, x.itemsize, [x], shares_gradient=True, storage=x.storage)
        self.autograd.call_before(x, partial(self.add_up, unit))
        return x

    # ---- What a schedule asks for ----
    def unshard(self, stage: int) -> None:
        """Start to gather all units of a stage."""
        for unit in self.units_of(stage):
            self.gather_ahead(unit)

    def wait_for_unshard(self, stage: int) -> None:
        """Copy the units of a stage out of the buffers that they are gathered into."""
        for unit in self.units_of(stage):
            self.gather(unit, is_backward=True)

    def reshard(self, stage: int) -> None:
        """Free the whole weights of a stage."""
        for unit in self.units_of(stage):
            self.release(unit)

    def reduce_stage(self, stage: int) -> None:
        """Reduce the gradients of a batch."""
        for unit in self.units_of(stage):
            self.add_up(unit)
            self.reduce(unit)
        self.buffer_of_last_reduction = None
