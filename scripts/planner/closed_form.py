# SPDX-License-Identifier: Apache-2.0
"""The closed form: one optimizer step of the recipe, written into a ledger.

    device, host = closed_form(plan, config, batch)

counts `gradient_accumulation_steps` micro-batches (at most three, since those between the first and
the last are alike), the optimizer's step, and a batch of evaluation. The plan is what the device
held at the worst moment.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from transformers import PretrainedConfig, PreTrainedModel

from .autograd import FP32, Autograd, Weight
from .blocks import EMBEDDING, TAIL, Forward, Part
from .decoder import PROJECTIONS, Decoder, read_decoder
from .errors import UnplannableError
from .fsdp import Fsdp1, Fsdp2
from .ledger import Ledger, Sizes
from .mesh import misfits_of_model
from .plan import Plan
from .ranks import Replica
from .recipe import RecipeArguments, has_router_loss
from .request import Batch
from .shapes import Quantized, build_base, layers_of, refuse_whole_modules
from .splits import refuse_partly_split, shapes_of
from .zero import Zero
from .zero3 import Zero3

Build = Callable[[RecipeArguments, PretrainedConfig], PreTrainedModel]
# Bytes of a checkpoint per trained element: the weight in fp32, and two moments
WEIGHT_BYTES = 4
CHECKPOINT_BYTES = 12
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
    if plan.args.async_save:
        host["checkpoint"] = share_of_checkpoint(plan, strategy)
    ledger = Ledger()
    for category, size in device.items():
        ledger.add(category, size)
    autograd = Autograd(ledger, plan.autocast_itemsize)
    strategy.begin(autograd)
    own_part = part_of(batch, plan.cp * plan.sp)
    train(Forward(autograd, decoder, own_part, plan, strategy.around), strategy)
    if plan.args.eval_strategy != "no":
        # Under DeepSpeed's sequence parallelism each rank evaluates whole rows.
        evaluation_batch = part_of(evaluation_batch_of(plan.args, batch), plan.cp)
        whole_rows = replace(plan, sp=1)
        forward = Forward(autograd, decoder, evaluation_batch, whole_rows, strategy.around)
        evaluate(forward, strategy)
    return ledger.at_peak, host


def share_of_checkpoint(plan: Plan, strategy: Replica) -> int:
    """Return the bytes that a rank keeps on the host while its checkpoint is written.

    Under tensor and expert parallelism this is the most that it can be: weights that are whole on
    each rank are counted as if they were split too. In a pipeline, the ranks with the same stages
    share what these have.
    """
    whole = strategy.elements * plan.tp * plan.ep
    return math.ceil(CHECKPOINT_BYTES * whole * plan.pp / plan.ranks)


def part_of(batch: Batch, parts: int) -> Batch:
    """Return the part of a batch that the fullest of several ranks has, if they share each row.

    Its tokens may be those that are trained on.
    """
    length = math.ceil(batch.length / parts)
    supervised = min(batch.supervised, batch.sequences * length)
    return replace(batch, length=length, supervised=supervised)


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
    run = forward.run()
    strategy.end_forward()
    forward.autograd.backward(run.loss)


def evaluate(forward: Forward, strategy: Replica) -> None:
    """Run a forward pass without a graph."""
    forward.autograd.no_grad = True
    strategy.begin_pass(is_last=True)
    forward.run()


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
    misfits = misfits_of_model(config, plan.mesh)
    if misfits:
        raise UnplannableError("; ".join(misfits))
    model = build(args, config)
    weights = Weights(plan, model)
    if args.use_peft:
        weights.copy_modules(copied_modules(model, args.modules_to_save))
    decoder = read_decoder(model, config, weights.of)
    if plan.tp > 1:
        refuse_partly_split(decoder.layers, plan.tp)
        decoder.heads //= plan.tp
        decoder.kv_heads //= plan.tp
    refuse_as_another_recipe(args, decoder)
    if args.use_peft:
        add_adapters(plan, model, decoder, weights)
    held = weights.of_module(model)
    extra = scales_of(model)
    if plan.engine in ("single", "ddp"):
        return Replica(plan, held, extra), decoder
    if plan.engine == "zero" and plan.stage < 3:
        return Zero(plan, held, extra), decoder
    units = units_of(plan, model, decoder, weights)
    gathers_tail_first = decoder.tied or plan.engine == "fsdp1"
    engine = {"fsdp1": Fsdp1, "fsdp2": Fsdp2, "zero": Zero3}[plan.engine]
    return engine(plan, held, extra, units, gathers_tail_first), decoder


class Weights:
    """The weights of a model as it is trained, from its parameters without peft.

    A parameter has one Weight, also if it is tied. Beside a layer peft makes adapters, and beside a
    module of --modules_to_save a copy: what trains and is computed with is the copy, and the
    original stays as it is.
    """

    def __init__(self, plan: Plan, model: PreTrainedModel) -> None:
        self.plan = plan
        # {id of a parameter: shape of this rank's part}
        self.shapes = shapes_of(model, plan.tp, plan.ep)
        self.by_id: dict[int, Weight] = {}
        self.copied: set[int] = set()  # ids of parameters
        self.originals: dict[Weight, Weight] = {}  # {copy: its frozen original}
        self.adapters: dict[Weight, tuple[Weight, Weight]] = {}  # {weight: its two adapters}

    def copy_modules(self, modules: list[torch.nn.Module]) -> None:
        """Train copies of modules from now on. Call it before anything else."""
        for module in modules:
            self.copied |= {id(parameter) for parameter in module.parameters()}

    def of(self, parameter: torch.Tensor) -> Weight:
        """Return the Weight that is computed with in the place of a parameter."""
        if id(parameter) not in self.by_id:
            weight = self.make(parameter)
            if id(parameter) in self.copied:
                original = weight
                original.is_used = False
                weight = self.make(parameter, is_copy=True)
                self.originals[weight] = original
            self.by_id[id(parameter)] = weight
        return self.by_id[id(parameter)]

    def of_module(self, module: torch.nn.Module) -> list[Weight]:
        """Return all weights of a module in the order of the model that peft makes."""
        found = []
        for parameter in distinct_parameters(module):
            weight = self.of(parameter)
            if weight in self.originals:
                found.append(self.originals[weight])
            found.append(weight)
            found += self.adapters.get(weight, ())
        return found

    def make(self, parameter: torch.Tensor, is_copy: bool = False) -> Weight:
        """Return a Weight in the precisions in which it is used for computation and stored.

        Under mixed precision DeepSpeed casts the model, and FSDP casts what it gathers; int8
        weights stay as they are. FSDP stores trained weights in fp32 (accelerate upcasts them). One
        process and DDP leave the model as it was loaded: autocast makes copies. The copy of a
        module is loaded in fp32 under mixed precision (wrap_in_adapters of the recipes).
        """
        plan = self.plan
        trains = is_copy or (parameter.requires_grad and not plan.args.use_peft)
        loaded = parameter.element_size()
        if is_copy and plan.low_itemsize:
            loaded = FP32
        computed = loaded
        is_cast = plan.is_fsdp or plan.engine == "zero"
        if plan.low_itemsize and is_cast and parameter.dtype != torch.int8:
            computed = plan.low_itemsize
        stored = computed
        if plan.is_fsdp:
            stored = FP32 if plan.low_itemsize and trains else loaded
        shape = self.shapes.get(id(parameter), parameter.shape)
        rows = shape[0] if shape else 1
        category = "whole modules" if is_copy else "parameters"
        weight = Weight(math.prod(shape), computed, trains, rows, stored, category)
        weight.is_split_expert = plan.ep > 1 and id(parameter) in self.shapes
        return weight


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
    embedding if it is tied. FSDP1: each layer, and a root with everything else; what peft adds is a
    unit for each module (wrap_adapters_for_fsdp1 of the recipes). Without a wrap policy the whole
    model is one unit. The experts of a layer are one that are spread over ranks.
    """
    if not plan.wraps_layers:
        return {TAIL: weights.of_module(model)}
    units: dict[Part, list[Weight]] = {}
    from_peft: dict[Part, list[Weight]] = {}
    if plan.engine == "fsdp1" and plan.args.use_peft:
        from_peft = {weight: [weight] for weight in weights.of_module(model) if weight.trains}
    elif plan.engine != "fsdp1" and not decoder.tied:
        units[EMBEDDING] = weights.of_module(model.get_input_embeddings())
    placed = set(units.get(EMBEDDING, [])).union(from_peft)
    if plan.ep > 1:
        units |= {layer.experts: layer.experts.weights for layer in decoder.layers if layer.experts}
        placed.update(*units.values())
    parts = zip([*decoder.layers, TAIL], [*layers_of(model), model], strict=True)
    for part, module in parts:
        units[part] = [weight for weight in weights.of_module(module) if weight not in placed]
        placed.update(units[part])
    return units | from_peft


# ---- What peft adds ----
PREFIX = "base_model.model."  # begins the paths of peft's model


def copied_modules(model: PreTrainedModel, names: list[str]) -> list[torch.nn.Module]:
    """Return the modules that peft copies for names in --modules_to_save: paths that end with one.

    Raises UnplannableError for a name that the recipe refuses, and for whole layers.
    """
    refuse_whole_modules(model, names)
    layers = set(layers_of(model))
    copied = []
    for path, module in model.named_modules():
        if not (PREFIX + path).endswith(tuple(names)):
            continue
        if layers.intersection(module.modules()):
            raise UnplannableError(
                f"--modules_to_save: {path} holds whole layers, whose copies the closed form does "
                "not cover: name modules inside them, or add --simulate"
            )
        copied.append(module)
    return copied


def add_adapters(plan: Plan, model: PreTrainedModel, decoder: Decoder, weights: Weights) -> None:
    """Add LoRA's A, [r, in], and B, [out, r], to projections, as peft does."""
    found = False
    for layer, module in zip(decoder.layers, layers_of(model), strict=True):
        for name, linear in adaptable(module, plan.args.lora_target_modules, weights):
            projection = layer.projections[PROJECTIONS[name]]
            projection.adapters = adapters_for(plan, linear, projection.by_inputs)
            weights.adapters[projection.weight] = projection.adapters
            found = True
    if not found:
        raise UnplannableError(
            f"--lora_target_modules {' '.join(plan.args.lora_target_modules)}: "
            "no such layers in this model"
        )


def refuse_as_another_recipe(args: RecipeArguments, decoder: Decoder) -> None:
    """Raise UnplannableError for a model whose plan needs another recipe."""
    has_experts = any(layer.experts is not None for layer in decoder.layers)
    if has_router_loss(args) and not has_experts:
        raise UnplannableError("the model has no experts: plan recipes/llama.py")
    if args.use_peft and has_experts and not has_router_loss(args):
        raise UnplannableError(
            "--use_peft: in recipes/llama.py peft may give experts adapters, which cannot be "
            "planned: plan recipes/mixtral.py"
        )


def adaptable(
    layer: torch.nn.Module, targets: list[str], weights: Weights
) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Yield (name, linear layer) of a decoder layer where peft adds adapters: not to copies."""
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if not isinstance(module, torch.nn.Linear) or name not in PROJECTIONS:
            continue
        is_target = targets == ["all-linear"] or name in targets
        if is_target and id(module.weight) not in weights.copied:
            yield name, module


def adapters_for(plan: Plan, linear: torch.nn.Linear, by_inputs: bool) -> tuple[Weight, Weight]:
    """Return LoRA's A and B for a linear layer, under tensor parallelism what a rank has of them.

    by_inputs: whether a rank then has some columns of A, as of the layer; otherwise it has some
    rows of B.
    """
    rank = plan.args.lora_r
    stored = stored_itemsize_of_adapters(plan)
    itemsize = stored
    if plan.low_itemsize and plan.engine not in ("single", "ddp"):
        itemsize = plan.low_itemsize
    inputs = linear.in_features
    outputs = linear.out_features
    if by_inputs:
        inputs //= plan.tp
    else:
        outputs //= plan.tp
    a = Weight(rank * inputs, itemsize, True, rank, stored, "adapters")
    b = Weight(rank * outputs, itemsize, True, outputs, stored, "adapters")
    return a, b


def stored_itemsize_of_adapters(plan: Plan) -> int:
    """Return the bytes per element of adapters: fp32, with one exception.

    FSDP2 needs one precision in a unit: beside copies of modules without mixed precision it is that
    of the base (wrap_in_adapters of the recipes).
    """
    if plan.engine == "fsdp2" and plan.low_itemsize is None and plan.args.modules_to_save:
        return getattr(torch, plan.args.dtype).itemsize
    return FP32
