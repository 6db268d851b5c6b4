# SPDX-License-Identifier: Apache-2.0
"""The host memory that a rank takes to save a checkpoint, beside what it trains with.

Each rank copies the boxes that it writes (core/checkpoint.py) to the host. What several ranks have
is shared out between them, so that a rank writes about an equal part of what it and they have.
"""

from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from .closed_form import strategy_for
from .pipeline import holders_of_weights
from .plan import Plan
from .ranks import FP32, state_bytes

MOMENTS = 2  # tensors of AdamW's state for each weight, besides the step


@dataclass(frozen=True)
class Saving:
    """What a rank keeps while it saves, in bytes.

    Attributes:
        whole: all tensors of the checkpoint.
        share: those of the rank that writes most.
        largest: the largest tensor.
        host: what all ranks of the host need at most that has most.
    """

    whole: int
    share: int
    largest: int
    host: int

    @property
    def most(self) -> int:
        """What a rank needs at most: its share and one tensor."""
        return self.share + self.largest


def saving_of(plan: Plan, config: PretrainedConfig) -> Saving:
    """Return what the ranks of a plan keep while they save a checkpoint.

    Raises UnplannableError for a model that the closed form does not cover.
    """
    by_weight = sizes_by_weight(plan, config)
    holders = [range(plan.ranks)] * len(by_weight)
    if plan.pp > 1:  # What a stage has is written by its ranks
        holders = holders_of_weights(plan, config)
    shares = [0.0] * plan.ranks
    for sizes, ranks in zip(by_weight, holders, strict=True):
        for rank in ranks:
            shares[rank] += sum(sizes.values()) / len(ranks)
    largest = max(max(sizes.values()) for sizes in by_weight)
    per_host = plan.ranks // plan.machines
    hosts = [sum(shares[first : first + per_host]) for first in range(0, plan.ranks, per_host)]
    whole = sum(sum(sizes.values()) for sizes in by_weight)
    return Saving(whole, round(max(shares)), largest, round(max(hosts)) + per_host * largest)


def sizes_by_weight(plan: Plan, config: PretrainedConfig) -> list[dict[str, int]]:
    """Return {name: bytes} of what a checkpoint has of each trained weight: itself and its state.

    They are whole, however the plan splits them; DeepSpeed's are fp32.
    """
    whole = replace(plan, engine="single", stage=0, ranks=1, shards=1, tp=1, cp=1, sp=1, ep=1, pp=1)
    strategy, _ = strategy_for(whole, config)
    by_weight = []
    for number, weight in enumerate(strategy.trained):
        nbytes = weight.numel * weight.stored_itemsize
        state = state_bytes(weight, weight.numel, plan.args.optim)
        if plan.engine == "zero":
            nbytes = weight.numel * FP32
            state = MOMENTS * nbytes
        name = f"{number:06d}"
        sizes = {name: nbytes, f"state.{name}.step": FP32}
        for moment in range(MOMENTS):
            sizes[f"state.{name}.{moment}"] = state // MOMENTS
        by_weight.append(sizes)
    return by_weight
