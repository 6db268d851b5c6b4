# SPDX-License-Identifier: Apache-2.0
"""The host memory that a rank takes to save a checkpoint, beside what it trains with.

It is worked out from the owners that the recipes choose (components/owners.py) for the tensors of
the real model, whose shapes are known without bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from transformers import PretrainedConfig

from components.owners import share_out

from .closed_form import strategy_for
from .pipeline import holders_of_weights
from .plan import Plan
from .ranks import FP32, state_bytes

MOMENTS = 2  # tensors of AdamW's state for each weight, besides the step
# What joining shards takes on the GPU of the owner, in sizes of the whole tensor, where they do not
# follow one another, as those of FSDP and DeepSpeed do: they are put in order in a second copy, and
# the owner still has up to a half of the tensor that it joined before (components/gathering.py).
JOINED_IN_ORDER = 2.5


@dataclass(frozen=True)
class Saving:
    """What a rank keeps while it saves, in bytes.

    Attributes:
        whole: all tensors of the checkpoint.
        share: those of the rank that owns most.
        largest: the largest tensor.
        host: what all ranks of the host need at most that has most.
    """

    whole: int
    share: int
    largest: int
    host: int

    @property
    def most(self) -> int:
        """What a rank needs at most: its share, and twice the largest tensor."""
        return self.share + 2 * self.largest


def saving_of(plan: Plan, config: PretrainedConfig) -> Saving:
    """Return what the ranks of a plan keep while they save a checkpoint.

    Raises UnplannableError for a model that the closed form does not cover.
    """
    by_weight = sizes_by_weight(plan, config)
    sizes = joined(by_weight)
    shares = [0] * plan.ranks
    for name, owner in share_out(sizes, plan.ranks, holders_of(plan, config, by_weight)).items():
        shares[owner] += sizes[name]
    largest = max(sizes.values())
    per_host = plan.ranks // plan.machines
    hosts = [sum(shares[first : first + per_host]) for first in range(0, plan.ranks, per_host)]
    most_of_host = max(hosts) + per_host * 2 * largest
    return Saving(sum(sizes.values()), max(shares), largest, most_of_host)


def bytes_to_join(plan: Plan, saving: Saving) -> int:
    """Return what a GPU needs at most to join the shards of a tensor; 0 if there are no shards."""
    if plan.tp > 1 or plan.ep > 1:
        return int(JOINED_IN_ORDER * saving.largest)
    is_sharded = plan.is_fsdp or (plan.engine == "zero" and plan.stage > 0)
    return saving.largest if is_sharded else 0


def holders_of(
    plan: Plan, config: PretrainedConfig, by_weight: Sequence[dict[str, int]]
) -> dict[str, list[int]] | None:
    """Return the ranks among which the owner of each tensor is chosen, None for all.

    What a stage of a pipeline has goes to one of its ranks (owners_of in components/state.py).

    Args:
        by_weight: the result of `sizes_by_weight`.
    """
    if plan.pp == 1:
        return None
    holders = {}
    for sizes, ranks in zip(by_weight, holders_of_weights(plan, config), strict=True):
        holders |= dict.fromkeys(sizes, ranks)
    return holders


def sizes_of_tensors(plan: Plan, config: PretrainedConfig) -> dict[str, int]:
    """Return {name: bytes} of the tensors of a checkpoint: trained weights and AdamW's state."""
    return joined(sizes_by_weight(plan, config))


def joined(by_weight: Sequence[dict[str, int]]) -> dict[str, int]:
    """Return the tensors of all weights in one."""
    sizes: dict[str, int] = {}
    for of_weight in by_weight:
        sizes |= of_weight
    return sizes


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
