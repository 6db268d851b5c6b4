# SPDX-License-Identifier: Apache-2.0
"""The mesh of a run: which ranks have other rows, and which share the rows, a row or the weights.

accelerate orders the ranks by dp_replicate, dp_shard, cp, sp and tp, the last one fastest
(accelerate/parallelism_config.py). Without a mesh, every rank has rows of its own.

A sum over all ranks counts what several of them have once for each, and is divided by their number:

    function          sums up what belongs to          ranks that have the same
    sum_over_rows     the rows of a rank               cp * sp * tp, which share rows
    sum_over_tokens   its tokens of them, in training  tp, which share tokens
                      and in evaluation                sp * tp, since rows are whole under SP

`sum_over_parts` stays within rows: it adds up the parts of those that share their tokens.
"""

import contextlib
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from accelerate.utils import gather_object

from components.plugins import expert_ranks, pipeline_ranks
from core.data import IGNORED

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Mesh:
    """The sizes of a mesh, and the place of this rank in it.

    Attributes:
        dp_replicate: groups of ranks that each have the whole weights.
        dp_shard: ranks that share the weights, and have rows of their own.
        cp: ranks that share the tokens of a row, in attention by a ring (context parallelism).
        sp: ranks that share the tokens of a row, in attention the heads (DeepSpeed-Ulysses).
        tp: ranks that share the matrices of each layer (tensor parallelism).
        pp: ranks of a pipeline, which each have other layers (pipeline parallelism).
        rank: of this process.
        ep: ranks that share the experts of each layer, and have rows of their own (expert
            parallelism). They are some of those that the other sizes count, not further ones.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    sp: int = 1
    tp: int = 1
    rank: int = 0
    pp: int = 1
    ep: int = 1

    @classmethod
    def of(cls, accelerator: "Accelerator") -> "Mesh":
        """Return the mesh of an Accelerator."""
        config: Any = accelerator.parallelism_config
        rank = accelerator.process_index
        pp = pipeline_ranks(accelerator)
        ep = expert_ranks(accelerator)
        if config is None:
            return cls(dp_shard=accelerator.num_processes // pp, rank=rank, pp=pp, ep=ep)
        return cls(
            dp_replicate=config.dp_replicate_size,
            dp_shard=config.dp_shard_size,
            cp=config.cp_size,
            sp=config.sp_size,
            tp=config.tp_size,
            rank=rank,
            pp=pp,
            ep=ep,
        )

    def describe(self, engine: str) -> str:
        """Return the name of a strategy with what the mesh adds to its engine, such as "TP 2"."""
        words = [engine] if engine else []
        for name in ("cp", "sp", "tp", "ep"):
            size = getattr(self, name)
            if size > 1:
                words.append(f"{name.upper()} {size}")
        return " x ".join(words)

    @property
    def copies(self) -> int:
        """The number of ranks that have the same rows."""
        return self.cp * self.sp * self.tp

    @property
    def data_ranks(self) -> int:
        """The number of groups of ranks that have different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        """The number of the group of this rank.

        The ranks of a pipeline lie apart, with those that have the same layers between them.
        """
        if self.pp > 1:
            return self.rank % self.data_ranks
        return self.rank // self.copies

    @property
    def token_rank(self) -> int:
        """The number of the group of ranks that compute with the same tokens of the same rows.

        Dropout has to draw the same in such a group, and something else in every other one.
        """
        return self.rank // self.tp

    def averaged(self, zero_stage: int | None = None) -> int:
        """Return the number by which the engine divides the sum of the gradients.

        A tensor parallel group has one gradient between its ranks. All others add theirs up, and
        divide by their number; but ZeRO-1 and ZeRO-2 leave out the ranks that share a row
        (deepspeed/runtime/zero/stage_1_and_2.py, average_tensor), and ZeRO-3 does not
        (deepspeed/runtime/comm/coalesced_collectives.py, reduce_scatter_coalesced).

        Args:
            zero_stage: of DeepSpeed; None for other engines.
        """
        if zero_stage in (1, 2):
            return self.data_ranks
        return self.data_ranks * self.cp * self.sp

    def parts_of_row(self, is_training: bool = True) -> int:
        """Return over how many ranks the tokens of a row are split.

        In evaluation accelerate has DeepSpeed's attention see whole rows (accelerator.py,
        _prepare_deepspeed, disable_in_eval).
        """
        return self.cp * (self.sp if is_training else 1)

    @property
    def pad_to_multiple_of(self) -> int:
        """The number of which the length of each line has to be a multiple.

        A ring gives each rank a piece of the first half of a row and one of the second, so that all
        have as much attention to compute (torch/distributed/tensor/experimental/_context_parallel/
        _load_balancer.py).
        """
        if self.cp > 1:
            return 2 * self.cp
        return self.sp


def sum_over_rows(accelerator: "Accelerator", value: Any) -> Any:
    """Return the sum of what belongs to the rows of all ranks. Every rank takes part.

    Args:
        value: the sum over the rows of this rank; ranks that share rows have the same.
    """
    return divided(accelerator.reduce(value), Mesh.of(accelerator).copies)


def sum_over_tokens(accelerator: "Accelerator", value: Any, is_training: bool = True) -> Any:
    """Return the sum of what belongs to the tokens of all ranks, such as losses.

    Args:
        value: the sum over the tokens of this rank in `part_of`, which may be a part of a row's.
    """
    mesh = Mesh.of(accelerator)
    return divided(accelerator.reduce(value), mesh.copies // mesh.parts_of_row(is_training))


def sum_over_parts(
    accelerator: "Accelerator", value: torch.Tensor, is_training: bool = True
) -> torch.Tensor:
    """Return the sum of what belongs to the rows of this rank, of whose tokens it has a part.

    The ranks that share the rows get the same. In the backward pass each follows its own part, so
    that their gradients add up to that of the sum.

    Args:
        value: the sums over the tokens of this rank in `part_of`, such as one for each row.
    """
    if Mesh.of(accelerator).parts_of_row(is_training) == 1:
        return value
    return SumOfParts.apply(value, group_of_parts(accelerator))


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


def group_of_parts(accelerator: "Accelerator") -> Any:
    """Return the process group of the ranks that share the tokens of this rank's rows."""
    if Mesh.of(accelerator).sp > 1:
        from deepspeed.utils import groups

        return groups._get_sequence_parallel_group()
    mesh: Any = accelerator.torch_device_mesh
    return mesh["cp"].get_group()


def divided(total: Any, number: int) -> Any:
    """Return a total of `number` equal parts, divided by it; as it is if there is one part."""
    if number == 1:
        return total
    return total / number


def gather_rows(accelerator: "Accelerator", rows: list[Any]) -> list[Any]:
    """Return what all ranks have of their rows, once for ranks that share rows."""
    mesh = Mesh.of(accelerator)
    return gather_object(rows if mesh.rank % mesh.copies == 0 else [])


# ---- Parts of rows ----
@contextlib.contextmanager
def part_of(
    accelerator: "Accelerator", batch: Mapping[str, Any], is_training: bool = True
) -> Generator[Mapping[str, Any]]:
    """Give this rank its part of a batch. Forward and backward pass belong into this context.

    Args:
        batch: as a TokenCollator returns it, of one row per line if ranks share rows in a ring.

    Raises:
        ValueError: if the model is given what is not split, such as positions of several rows of a
            line, which a ring would not keep apart.
    """
    mesh = Mesh.of(accelerator)
    if mesh.sp > 1:
        batch = tell_attention_the_rows(batch)
    if mesh.parts_of_row(is_training) == 1:
        yield batch
        return
    split = {"input_ids", "position_ids", "row_lengths"} if mesh.sp > 1 else {"input_ids"}
    others = sorted(set(batch["inputs"]) - split)
    if others:
        raise ValueError(f"{others} are not split over ranks, and the model is given them")
    ids = batch["inputs"]["input_ids"].clone()
    targets = torch.full_like(ids, IGNORED)
    targets.view(-1)[batch["positions"]] = batch["targets"]
    places = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape).contiguous()
    if mesh.sp > 1:
        yield piece_of(batch, mesh, ids, targets, places)
        return
    tensors = [ids, targets, places]
    with accelerator.maybe_context_parallel(tensors, [1, 1, 1], no_restore_buffers=set(tensors)):
        # The tensors are now those of this rank's tokens.
        yield rejoined(batch, ids, targets, places)


def piece_of(
    batch: Mapping[str, Any],
    mesh: Mesh,
    ids: torch.Tensor,
    targets: torch.Tensor,
    places: torch.Tensor,
) -> dict[str, Any]:
    """Return a batch with one of the equal pieces of each line, under sequence parallelism.

    Args:
        ids, targets, places: of the whole lines, as `rejoined` takes those of a part.
    """
    own = mesh.rank // mesh.tp % mesh.sp

    def cut(whole: torch.Tensor) -> torch.Tensor:
        return whole.chunk(mesh.sp, 1)[own].contiguous()

    part = rejoined(batch, cut(ids), cut(targets), cut(places))
    # Where rows share a line, positions are those in a row, and the lengths are given too.
    positions = cut(batch["inputs"].get("position_ids", places))
    part["inputs"] = batch["inputs"] | part["inputs"] | {"position_ids": positions}
    return part


def tell_attention_the_rows(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch whose model's attention is given the rows of each line, if they share one.

    They are the rows of whole lines for each rank (components/row_attention.py).
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
