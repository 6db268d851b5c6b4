# SPDX-License-Identifier: Apache-2.0
"""The closed form: one optimizer step of the recipe, written into a ledger.

    device, host = closed_form(plan, config, batch)

counts `gradient_accumulation_steps` micro-batches (at most three, since those between the first and
the last are alike), the optimizer's step, and a batch of evaluation. The plan is what the device
held at the worst moment.
"""

import math
from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .autograd import FP32, Autograd, Weight
from .blocks import EMBEDDING, TAIL, Forward, Part
from .decoder import PROJECTIONS, Decoder, Layer, read_decoder
from .errors import UnplannableError
from .fsdp import Fsdp1, Fsdp2
from .ledger import Ledger, Sizes
from .plan import Plan
from .ranks import Replica
from .recipe import RecipeArguments
from .request import Batch
from .shapes import Quantized, build_base, layers_of
from .zero import Zero
from .zero3 import Zero3

Build = Callable[[RecipeArguments, PretrainedConfig], PreTrainedModel]
MICRO_BATCHES = 3  # the first, one in the middle, the last


def closed_form(
    plan: Plan, config: PretrainedConfig, batch: Batch, build: Build = build_base
) -> tuple[Sizes, Sizes]:
    """Return {category: bytes} of the device at its peak, and of the host.

    build: makes the model on the meta device. Raises UnplannableError for a model that must be
    traced instead.
    """
    strategy, decoder = strategy_for(plan, config, build)
    return run_step(plan, strategy, decoder, batch)


def run_step(plan: Plan, strategy: Replica, decoder: Decoder, batch: Batch) -> tuple[Sizes, Sizes]:
    """Return what `closed_form` does, for what `strategy_for` made of a plan."""
    device, host = strategy.at_rest()
    ledger = Ledger()
    for category, size in device.items():
        ledger.add(category, size)
    autograd = Autograd(ledger, plan.autocast_itemsize)
    strategy.begin(autograd)
    train(Forward(autograd, decoder, batch, plan.args), strategy)
    if plan.args.eval_strategy != "no":
        evaluation_batch = evaluation_batch_of(plan.args, batch)
        evaluate(Forward(autograd, decoder, evaluation_batch, plan.args), strategy)
    return ledger.at_peak, host


def train(forward: Forward, strategy: Replica) -> None:
    """Run one optimizer step."""
    number = min(forward.args.gradient_accumulation_steps, MICRO_BATCHES)
    for index in range(number):
        strategy.begin_pass(is_last=index == number - 1)
        forward_and_backward(forward, strategy)
        strategy.end_pass()
    strategy.step()


def forward_and_backward(forward: Forward, strategy: Replica) -> None:
    """Run a micro-batch; what the forward pass holds is freed at the end of the backward pass."""
    run = forward.run(strategy.around)
    strategy.end_forward()
    forward.autograd.backward(run.loss)


def evaluate(forward: Forward, strategy: Replica) -> None:
    """Run a forward pass without a graph."""
    forward.autograd.no_grad = True
    strategy.begin_pass(is_last=True)
    forward.run(strategy.around)


def evaluation_batch_of(args: RecipeArguments, batch: Batch) -> Batch:
    """Return a batch of evaluation, with rows as long and as much supervised as in training.

    Evaluation does not pack.
    """
    sequences = args.per_device_eval_batch_size
    supervised = math.ceil(sequences * batch.supervised / batch.sequences)
    return Batch(sequences, batch.length, supervised)


# ---- From a model to what its ranks hold ----
def strategy_for(
    plan: Plan, config: PretrainedConfig, build: Build = build_base
) -> tuple[Replica, Decoder]:
    """Return what a rank holds under a plan, and the decoder that it trains."""
    args = plan.args
    if args.use_peft and args.use_dora:
        raise UnplannableError(
            "--use_dora: the closed form does not cover DoRA's norms of weights: add --simulate"
        )
    model = build(args, config)
    weights = Weights(plan)
    decoder = read_decoder(model, config, weights.of)
    if args.use_peft:
        add_adapters(plan, model, decoder)
    own = [weights.of(parameter) for parameter in distinct_parameters(model)]
    adapters = [weight for layer in decoder.layers for weight in adapters_of(layer)]
    extra = scales_of(model)
    if plan.engine in ("single", "ddp"):
        return Replica(plan, own + adapters, extra), decoder
    if plan.engine == "zero" and plan.stage < 3:
        return Zero(plan, own + adapters, extra), decoder
    units = units_of(plan, model, decoder, weights)
    gathers_tail_first = decoder.tied or plan.engine == "fsdp1"
    engine = {"fsdp1": Fsdp1, "fsdp2": Fsdp2, "zero": Zero3}[plan.engine]
    return engine(plan, own + adapters, extra, units, gathers_tail_first), decoder


class Weights:
    """The Weight of each parameter of a model, one and the same for tied ones."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.by_id: dict[int, Weight] = {}

    def of(self, parameter: torch.Tensor) -> Weight:
        """Return the Weight of a parameter."""
        if id(parameter) not in self.by_id:
            self.by_id[id(parameter)] = self.make(parameter)
        return self.by_id[id(parameter)]

    def make(self, parameter: torch.Tensor) -> Weight:
        """Return a Weight in the precisions in which it is used for computation and stored.

        Under mixed precision DeepSpeed casts the model, and FSDP casts what it gathers; int8
        weights stay as they are. FSDP stores trained weights in fp32 (accelerate upcasts them). One
        process and DDP leave the model as it was loaded: autocast makes copies.
        """
        plan = self.plan
        trains = parameter.requires_grad and not plan.args.use_peft
        loaded = parameter.element_size()
        computed = loaded
        is_cast = plan.is_fsdp or plan.engine == "zero"
        if plan.low_itemsize and is_cast and parameter.dtype != torch.int8:
            computed = plan.low_itemsize
        stored = computed
        if plan.is_fsdp:
            stored = FP32 if plan.low_itemsize and trains else loaded
        rows = parameter.shape[0] if parameter.dim() else 1
        return Weight(parameter.numel(), computed, trains, rows, stored)


def distinct_parameters(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of a module, tied ones once."""
    return list(dict.fromkeys(module.parameters()))


def scales_of(model: torch.nn.Module) -> Sizes:
    """Return the bytes of all scales of quantized weights, by category."""
    size = 0
    for module in model.modules():
        if isinstance(module, Quantized):
            size += sum(buffer.nbytes for buffer in module.buffers())
    if size == 0:
        return {}
    return {"quantization": size}


def units_of(
    plan: Plan, model: PreTrainedModel, decoder: Decoder, weights: Weights
) -> dict[Part, list[Weight]]:
    """Return the weights of each unit, which is gathered as a whole.

    FSDP2 and ZeRO-3: embedding, each layer, and the tail (final norm and head), which includes the
    embedding if it is tied. FSDP1: each layer, and a root with everything else. Without a wrap
    policy the whole model is one unit.
    """
    units: dict[Part, list[Weight]] = {EMBEDDING: []}
    if not decoder.tied:
        units[EMBEDDING] = [decoder.embedding]
    for layer, module in zip(decoder.layers, layers_of(model), strict=True):
        own = [weights.of(parameter) for parameter in distinct_parameters(module)]
        units[layer] = own + adapters_of(layer)
    placed = {id(weight) for members in units.values() for weight in members}
    own = [weights.of(parameter) for parameter in distinct_parameters(model)]
    units[TAIL] = [weight for weight in own if id(weight) not in placed]
    if plan.engine == "fsdp1":
        units[TAIL] = units.pop(EMBEDDING) + units[TAIL]
    if not plan.wraps_layers:
        return {TAIL: [weight for members in units.values() for weight in members]}
    return units


# ---- Adapters ----
def add_adapters(plan: Plan, model: PreTrainedModel, decoder: Decoder) -> None:
    """Add LoRA's A, [r, in], and B, [out, r], stored in fp32, to projections, as peft does."""
    targets = plan.args.lora_target_modules
    found = False
    for layer, module in zip(decoder.layers, layers_of(model), strict=True):
        for path, linear in module.named_modules():
            leaf = path.rpartition(".")[2]
            is_known = isinstance(linear, torch.nn.Linear) and leaf in PROJECTIONS
            if is_known and (targets == ["all-linear"] or leaf in targets):
                layer.projections[PROJECTIONS[leaf]].adapters = adapters_for(plan, linear)
                found = True
    if not found:
        raise UnplannableError(
            f"--lora_target_modules {' '.join(targets)}: no such layers in this model"
        )


def adapters_for(plan: Plan, linear: torch.nn.Linear) -> tuple[Weight, Weight]:
    """Return LoRA's A and B for a linear layer."""
    rank = plan.args.lora_r
    itemsize = FP32
    if plan.low_itemsize and plan.engine not in ("single", "ddp"):
        itemsize = plan.low_itemsize
    a = Weight(rank * linear.in_features, itemsize, True, rank, FP32, "adapters")
    b = Weight(rank * linear.out_features, itemsize, True, linear.out_features, FP32, "adapters")
    return a, b


def adapters_of(layer: Layer) -> list[Weight]:
    """Return the adapters of a layer."""
    return [weight for projection in layer.projections.values() for weight in projection.adapters]
