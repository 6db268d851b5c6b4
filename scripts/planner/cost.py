# SPDX-License-Identifier: Apache-2.0
"""The cost of a micro-batch, which ranks ways to run. It is not an estimate of time.

The unit is the forward pass of a micro-batch:

- compute: 1 for the forward pass, 1 for gradients of activations, 1 for gradients of weights (those
  of adapters take next to nothing), and 1 more with --gradient_checkpointing. Full weights cost 1.5
  times as much as LoRA; 1.47 was published (NeMo, Llama 2 7B).
- a quantized base: all of that times QUANTIZED.
- communication: TOKENS_PER_TRIP / tokens for each time that as many numbers as the model has
  parameters cross the wire. A ring's all-reduce sends each number twice, a reduce-scatter or a
  gather once.

Ranks that share rows do the work of one row together. The cost is that of their rows for each
rank, so that what a rank sends counts once for each of them:

- TP adds up whole hidden states in each layer: after two matrices in the forward pass, and before
  five in the backward pass;
- CP sends keys and values around, and their gradients back;
- SP swaps tokens for heads around attention, in both passes.

Ways that offload come last (candidates.py), since the host and the bus limit them.
"""

from typing import NamedTuple

from .decoder import Decoder
from .plan import Plan
from .ranks import Replica
from .recipe import RecipeArguments

# Step time relative to LoRA on a bf16 base. nf4: the median of what is published (torchtune 1.02
# and 1.28, Lightning AI 1.39, litgpt 1.56 and 2.0 for 7B and 13B). Double quantization: 3.83
# against 3.68 minutes (litgpt). int8: "over twice as slow" (PhoebusSi/Alpaca-CoT#26), and slower
# than 4-bit (bitsandbytes#490).
QUANTIZED = {"": 1.0, "4-bit": 1.39, "4-bit twice": 1.45, "int8": 2.0}
# Tokens that a forward pass computes while all parameters cross the wire once, at 400 TFLOP/s and
# 200 GB/s: a parameter takes 2 bytes to send, and 2 FLOP per token.
TOKENS_PER_TRIP = 2000


class Cost(NamedTuple):
    """The cost of a micro-batch in forward passes, and the reasons, the most important first."""

    units: float
    reasons: list[str]


class Traffic(NamedTuple):
    """How many numbers a rank sends per micro-batch, and why, in words."""

    numbers: float
    reason: str


def cost_of(plan: Plan, strategy: Replica, decoder: Decoder, parameters: int, tokens: int) -> Cost:
    """Return the cost of a micro-batch with a number of tokens, those of whole rows.

    strategy: what a rank holds under the plan. parameters: of the model without adapters.
    """
    numbers = sum(weight.numel for weight in strategy.weights)
    traffic = traffic_of(plan, numbers, strategy.elements)
    of_rows = traffic_of_rows(plan, decoder, tokens)
    sent = plan.copies * (traffic.numbers + of_rows.numbers)
    units = compute_of(plan.args)
    units += TOKENS_PER_TRIP / tokens * sent / parameters
    reasons = [of_rows.reason, traffic.reason, *reasons_of_compute(plan.args)]
    reasons = [reason for reason in reasons if reason]
    if plan.offloads_parameters:
        reasons.insert(0, "state on the host")
    elif plan.offloads_optimizer:
        reasons.insert(0, "optimizer on the host")
    return Cost(units, reasons)


def compute_of(args: RecipeArguments) -> float:
    """Return the compute of a micro-batch, in forward passes."""
    units = 2 if args.use_peft else 3
    if args.gradient_checkpointing:
        units += 1
    return units * QUANTIZED[kind_of_base(args)]


def kind_of_base(args: RecipeArguments) -> str:
    """Return how the base is quantized, as QUANTIZED names it."""
    if args.load_in_8bit:
        return "int8"
    if args.load_in_4bit and args.bnb_4bit_use_double_quant:
        return "4-bit twice"
    if args.load_in_4bit:
        return "4-bit"
    return ""


def reasons_of_compute(args: RecipeArguments) -> list[str]:
    """Return in words what adds to the compute of a micro-batch."""
    reasons = []
    if args.gradient_checkpointing:
        reasons.append("recomputes")
    if kind_of_base(args):
        reasons.append("dequantizes")
    return reasons


def traffic_of_rows(plan: Plan, decoder: Decoder, tokens: int) -> Traffic:
    """Return what a rank sends of the rows of a micro-batch, whole ones if ranks share them."""
    again = 1 if plan.args.gradient_checkpointing else 0  # The forward pass runs twice.
    of_token = decoder.hidden * len(decoder.layers) * tokens
    keys = decoder.kv_heads * plan.tp * decoder.head_dim * len(decoder.layers) * tokens
    if plan.tp > 1:
        sent = 2 * (2 + 5 + 2 * again) * of_token * (plan.tp - 1) / plan.tp
        return Traffic(sent, "hidden states travel in each layer")
    if plan.cp > 1:
        sent = (3 + again) * 2 * keys * (plan.cp - 1) / plan.cp
        return Traffic(sent, "keys and values travel")
    if plan.sp > 1:
        share = (plan.sp - 1) / plan.sp**2
        return Traffic((2 + again) * 2 * (of_token + keys) * share, "heads travel")
    if plan.ep > 1:
        lines = sum(layer.experts.per_token for layer in decoder.layers if layer.experts) * tokens
        sent = 2 * (2 + again) * lines * decoder.hidden * (plan.ep - 1) / plan.ep
        return Traffic(sent, "tokens travel to experts")
    return Traffic(0, "")


def traffic_of(plan: Plan, numbers: int, trained: int) -> Traffic:
    """Return what a rank sends for a micro-batch.

    numbers: parameters of the model. trained: those that train. What is reduced once per step is
    divided by the number of micro-batches of a step.
    """
    once_per_step = trained / plan.args.gradient_accumulation_steps
    if plan.ranks == 1:
        return Traffic(0, "one process: nothing travels")
    if plan.engine == "single":
        return Traffic(0, "")
    if plan.engine == "zero" and plan.stage == 2:
        sent = trained + once_per_step
        return Traffic(sent, "whole parameters: gradients, updates travel")
    if plan.engine == "zero" and plan.stage == 1:
        return Traffic(2 * once_per_step, "whole parameters: gradients, updates travel")
    replicates = plan.engine == "ddp" or (plan.engine == "zero" and plan.stage == 0)
    if replicates or plan.shards == 1:
        return Traffic(2 * once_per_step, "whole replicas: only gradients travel")
    return traffic_of_sharded(plan, numbers, trained)


def traffic_of_sharded(plan: Plan, numbers: int, trained: int) -> Traffic:
    """Return what a rank sends for a micro-batch if parameters are sharded.

    It gathers them for the forward pass and, unless it keeps them, again for the backward pass, and
    reduces gradients. Groups also all-reduce their shares of gradients between them.
    """
    between_groups = 0
    place = ""
    if plan.replicas > 1:
        between_groups = 2 * trained / plan.shards
        place = " in groups"
    if plan.reshards:
        sent = 2 * numbers + trained + between_groups
        return Traffic(sent, f"gathers parameters twice{place}")
    sent = numbers + trained + between_groups
    return Traffic(sent, f"gathers parameters once{place}")
