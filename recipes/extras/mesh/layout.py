# SPDX-License-Identifier: Apache-2.0
"""The layout of a mesh: which ranks share the rows, a row or the weights, and each one's part.

accelerate orders the ranks by dp_replicate, dp_shard, cp, sp and tp, the last one fastest
(accelerate/parallelism_config.py). A sum over all ranks counts what several of them have once for
each, and is divided by their number:

    method            sums up what belongs to          ranks that have the same
    sum_over_rows     the rows of a rank               cp * sp * tp, which share rows
    sum_over_tokens   its tokens of them, in training  tp, which share tokens
                      and in evaluation                sp * tp, since rows are whole under SP

`sum_over_parts` stays within rows: it adds up the parts of those that share their tokens.
"""

import contextlib
import importlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from core.data import IGNORED
from core.engine import Layout, own_parts_only, zero_stage
from extras.mesh import workarounds
from extras.mesh.adapters import split_adapters


@dataclass(frozen=True)
class MeshLayout(Layout):
    """A mesh in which ranks share rows.

    `sizes` has three kinds of ranks:
        cp: they share the tokens of a row, in attention by a ring (context parallelism).
        sp: they share the tokens of a row, in attention the heads (DeepSpeed-Ulysses).
        tp: they share the matrices of each layer (tensor parallelism).
    """

    @property
    def strategy(self) -> str:
        """What really runs; without an engine that shards, only the groups of ranks."""
        return super().strategy.removeprefix("DDP x ")

    @property
    def cp(self) -> int:
        """Ranks that share a row in a ring."""
        return self.sizes.get("cp", 1)

    @property
    def sp(self) -> int:
        """Ranks that share a row and exchange heads."""
        return self.sizes.get("sp", 1)

    @property
    def tp(self) -> int:
        """Ranks that share matrices."""
        return self.sizes.get("tp", 1)

    # ---- Ranks ----
    @property
    def copies(self) -> int:
        """The number of ranks that have the same rows."""
        return self.cp * self.sp * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of groups of ranks that have different rows."""
        return self.accelerator.num_processes // self.copies

    @property
    def data_rank(self) -> int:
        """The number of the group of this rank."""
        return self.accelerator.process_index // self.copies

    @property
    def token_rank(self) -> int:
        """The number of the group of ranks that compute with the same tokens."""
        return self.accelerator.process_index // self.tp

    @property
    def gradient_divisor(self) -> int:
        """The number by which the engine divides the sum of the gradients.

        A tensor parallel group has one gradient between its ranks. All others add theirs up, and
        divide by their number; but ZeRO-1 and ZeRO-2 leave out the ranks that share a row
        (deepspeed/runtime/zero/stage_1_and_2.py, average_tensor), and ZeRO-3 does not
        (deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced).
        """
        if zero_stage(self.accelerator) in (1, 2):
            return self.data_ranks
        return self.data_ranks * self.cp * self.sp

    @property
    def multiple_of(self) -> int:
        """The number of which the length of each line has to be a multiple.

        A ring gives each rank a piece of the first half of a row and one of the second, so that all
        have as much attention to compute (torch/distributed/tensor/experimental/_context_parallel/
        _load_balancer.py).
        """
        return 2 * self.cp if self.cp > 1 else self.sp

    def parts_of_row(self, is_training: bool = True) -> int:
        """Return over how many ranks the tokens of a row are split.

        In evaluation accelerate has DeepSpeed's attention see whole rows (accelerator.py,
        _prepare_deepspeed, disable_in_eval).
        """
        return self.cp * (self.sp if is_training else 1)

    # ---- Sums ----
    def sum_over_rows(self, value: Any) -> Any:
        """Return the sum of what belongs to the rows of all ranks. Every rank takes part."""
        return divided(self.accelerator.reduce(value), self.copies)

    def sum_over_tokens(self, value: Any, is_training: bool = True) -> Any:
        """Return the sum of what belongs to the tokens of all ranks, such as losses."""
        same = self.copies // self.parts_of_row(is_training)
        return divided(self.accelerator.reduce(value), same)

    def sum_over_parts(self, value: torch.Tensor, is_training: bool = True) -> torch.Tensor:
        """Return the sum over the ranks that share the tokens of this rank's rows."""
        if self.parts_of_row(is_training) == 1:
            return value
        return SumOfParts.apply(value, self.group_of_parts())

    def group_of_parts(self) -> Any:
        """Return the process group of the ranks that share the tokens of this rank's rows."""
        if self.sp > 1:
            from deepspeed.utils import groups

            return groups._get_sequence_parallel_group()
        mesh: Any = self.accelerator.torch_device_mesh
        return mesh["cp"].get_group()

    def gather(self, items: list[Any]) -> list[Any]:
        """Return what all ranks have of their rows, once for ranks that share rows."""
        is_first = self.accelerator.process_index % self.copies == 0
        return super().gather(items if is_first else [])

    # ---- Parts of rows ----
    @contextlib.contextmanager
    def part_of(
        self, batch: Mapping[str, Any], is_training: bool = True
    ) -> Generator[Mapping[str, Any]]:
        """Give this rank its part of a batch. Forward and backward pass belong into this context.

        Args:
            batch: as a TokenCollator returns it, of one row per line if ranks share rows in a ring.

        Raises:
            ValueError: if the model is given what is not split, such as positions of several rows
                of a line, which a ring would not keep apart.
        """
        if self.sp > 1:
            batch = tell_attention_the_rows(batch)
        if self.parts_of_row(is_training) == 1:
            yield batch
            return
        split = {"input_ids", "position_ids", "row_lengths"} if self.sp > 1 else {"input_ids"}
        others = sorted(set(batch["inputs"]) - split)
        if others:
            raise ValueError(f"{others} are not split over ranks, and the model is given them")
        ids = batch["inputs"]["input_ids"].clone()
        targets = torch.full_like(ids, IGNORED)
        targets.view(-1)[batch["positions"]] = batch["targets"]
        places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
        if self.sp > 1:
            yield self._piece_of(batch, ids, targets, places)
            return
        tensors = [ids, targets, places]
        # Within this context the tensors are those of this rank's tokens
        with self.accelerator.maybe_context_parallel(
            tensors, [1, 1, 1], no_restore_buffers=set(tensors)
        ):
            yield rejoined(batch, ids, targets, places)

    def _piece_of(
        self,
        batch: Mapping[str, Any],
        ids: torch.Tensor,
        targets: torch.Tensor,
        places: torch.Tensor,
    ) -> dict[str, Any]:
        """Return a batch with one of the equal pieces of each line, under sequence parallelism.

        Args:
            ids, targets, places: of the whole lines, as `rejoined` takes those of a part.
        """
        own = self.accelerator.process_index // self.tp % self.sp

        def cut(whole: torch.Tensor) -> torch.Tensor:
            return whole.chunk(self.sp, 1)[own].contiguous()

        part = rejoined(batch, cut(ids), cut(targets), cut(places))
        # Where rows share a line, positions are those in a row, and the lengths are given too.
        positions = cut(batch["inputs"].get("position_ids", places))
        part["inputs"] = batch["inputs"] | part["inputs"] | {"position_ids": positions}
        return part

    # ---- The model ----
    @property
    def splits_weights(self) -> bool:
        """Whether each rank reads only its part of the weights."""
        return self.tp > 1

    def from_pretrained(self, auto_class: Any, name: str, **options: Any) -> Any:
        """Return from_pretrained's result, with this rank's part of each matrix under TP.

        Raises:
            ValueError: if transformers has no plan by which to split this model.
        """
        if self.tp == 1:
            loaded = super().from_pretrained(auto_class, name, **options)
            if self.sp > 1:
                workarounds.name_size_of_heads(loaded[0])
            return loaded
        splits = DistributedConfig(tp_size=self.tp)
        with workarounds.splitting_over(self.accelerator):
            loaded = super().from_pretrained(auto_class, name, distributed_config=splits, **options)
        model, _ = loaded
        # Otherwise save_pretrained waits on the writing rank for ranks that do not call it.
        del model.config.distributed_config
        own_parts_only(model)
        if not any(isinstance(weight, DTensor) for weight in model.parameters()):
            raise ValueError(
                f"transformers has no plan by which to split the matrices of a "
                f"{model.config.model_type} model: use fsdp2_full_shard.yaml"
            )
        workarounds.keep_gradients_split(model)
        return loaded

    @contextlib.contextmanager
    def making_adapters(self, model: Any) -> Generator[None]:
        """Have peft make whole adapters within this context, and split them as the model is."""
        if self.tp == 1:
            yield
            return
        with workarounds.making_whole_adapters(), workarounds.copying_split_weights():
            yield
        mesh: Any = self.accelerator.torch_device_mesh
        split_adapters(model, mesh["tp"])

    @contextlib.contextmanager
    def heeding_masks(self, model: Any) -> Generator[None]:
        """Have attention in evaluation heed masks under DeepSpeed-Ulysses too.

        Rows are whole in evaluation, but DeepSpeed drops their masks all the same. Prompts that are
        padded on the left would be answered from the padding. Other evaluations do without masks,
        since padding on the right is seen by no token before it.

        Args:
            model: of transformers, without wrappers.
        """
        if self.sp == 1:
            yield
            return
        attentions = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
        name = model.config._attn_implementation
        of_deepspeed = attentions[name]
        del attentions[name]  # What is registered under this name is then found.
        try:
            yield
        finally:
            attentions[name] = of_deepspeed


class SumOfParts(torch.autograd.Function):
    """The sum of a tensor over a group of ranks, whose gradient is passed on as it is.

    torch.distributed.nn.functional.all_reduce would add up the gradients of the ranks too.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, group: Any) -> torch.Tensor:
        """Return the sum over the ranks of a process group, in the shape of `value`."""
        total = value.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    # pyrefly: ignore[bad-override]  # one gradient, since there is one output
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient of this rank's part."""
        return gradient, None


def divided(total: Any, number: int) -> Any:
    """Return a total of `number` equal parts, divided by it; as it is if there is one part."""
    if number == 1:
        return total
    return total / number


def tell_attention_the_rows(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch whose model's attention is given the rows of each line, if they share one.

    They are the rows of whole lines for each rank (attention.py).
    """
    if "position_ids" not in batch["inputs"]:
        return batch
    return {**batch, "inputs": {**batch["inputs"], "row_lengths": batch["row_lengths"]}}


def rejoined(
    batch: Mapping[str, Any], ids: torch.Tensor, targets: torch.Tensor, places: torch.Tensor
) -> dict[str, Any]:
    """Return a batch with the tokens of this rank.

    Its "cells" are where the targets are in the flattened whole lines, as PairCollator has them.

    Args:
        ids, targets, places: [rows, tokens of this rank]; the target of a token is the next one.
    """
    trained_on = (targets.flatten() != IGNORED).nonzero()[:, 0]
    lines = trained_on // ids.shape[1]
    width = batch["inputs"]["input_ids"].shape[1]
    return {
        **batch,
        "inputs": {"input_ids": ids, "position_ids": places},
        "positions": trained_on,
        "targets": targets.flatten()[trained_on],
        "cells": lines * width + places.flatten()[trained_on] + 1,
    }
