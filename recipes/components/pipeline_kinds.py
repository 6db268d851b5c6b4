# SPDX-License-Identifier: Apache-2.0
"""The kinds of schedules: which stages a rank has, and how many micro-batches each kind needs."""

from collections.abc import Mapping
from dataclasses import dataclass

from core.arguments import CommonArguments, LossInHeadArguments, PipelineArguments


@dataclass(kw_only=True)
class PipelineTrainingArguments(PipelineArguments, LossInHeadArguments, CommonArguments):
    """The arguments of the recipes that train a causal language model over a pipeline."""


@dataclass(frozen=True)
class Kind:
    """A kind of schedule.

    Attributes:
        class_name: its class in torch.distributed.pipelining.
        stages_per_rank: how many stages a rank has.
        is_folded: whether the second half of the stages goes back over the ranks, so that the first
            rank also has the last stage.
    """

    class_name: str
    stages_per_rank: int = 1
    is_folded: bool = False

    def stages_of(self, rank: int, num_ranks: int) -> list[int]:
        """Return the numbers of the stages of a rank of a pipeline."""
        if self.is_folded:
            return [rank, 2 * num_ranks - 1 - rank]
        return [rank + turn * num_ranks for turn in range(self.stages_per_rank)]


# By --pipeline_schedule
KINDS: Mapping[str, Kind] = {
    "1f1b": Kind("Schedule1F1B"),
    "gpipe": Kind("ScheduleGPipe"),
    "interleaved": Kind("ScheduleInterleaved1F1B", stages_per_rank=2),
    "interleaved_zero_bubble": Kind("ScheduleInterleavedZeroBubble", stages_per_rank=2),
    "zbv": Kind("ScheduleZBVZeroBubble", stages_per_rank=2, is_folded=True),
}


def why_not_scheduled(name: str, num_ranks: int, num_microbatches: int) -> str:
    """Return why a schedule cannot run so many micro-batches, or "".

    Args:
        name: a key of KINDS.
        num_ranks: ranks per pipeline.
    """
    if name == "1f1b" and num_microbatches < num_ranks:
        return f"1f1b needs at least {num_ranks}, one for each stage"
    if not name.startswith("interleaved"):
        return ""
    rounds = max(1, num_microbatches // num_ranks)
    if num_microbatches % rounds == 0:
        return ""
    return f"{name} runs them in equal rounds of at least {num_ranks}"


def num_microbatches(args: PipelineTrainingArguments) -> int:
    """Return how many micro-batches are in a batch: --num_microbatches, or one for each row."""
    return args.num_microbatches or args.per_device_train_batch_size
