# SPDX-License-Identifier: Apache-2.0
"""One micro-batch of a recipe on fake tensors, as a Profile: its phases and its weights.

The recipe's own `load_model` makes the model from its config, and the recipe's own loss runs over
it under torch's FakeTensorMode, where tensors are allocated and freed as real ones are. The pass is
cut at the inputs of the decoder's layers. A phase is the forward or backward pass of a unit: the
embedding (unit 0), each layer, and the tail (final norm, head and loss). Where all layers are
alike, three are traced, and the middle one stands for all between the first and the last.

Bytes of a phase are those of all tensors but weights and buffers of the model.
"""

import weakref
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import first_line
from core.exits import End, Exit
from core.loss import LossInHead
from core.model import base_model_of
from extras.float8.linear import Float8Linear

from .model import FP32, Quantized, layers_of, libraries_that_take_fakes, load, loss_of
from .plan import REHEARSE, Batch, Plan, first_rank

WAIT = torch.ops._c10d_functional.wait_tensor.default
MIDDLE = 2  # the unit of the middle one of three layers, which stands for those that are left out


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, or what the first rank has of one that ranks split.

    Attributes:
        numel: elements.
        rows: its first dimension, by which FSDP2 shards it.
        itemsize: bytes per element in which the model computes with it.
        stored: bytes per element in which it is kept between steps.
        trains, is_embedding: whether it is trained, and whether it is an embedding's.
        unit: the phase's unit that computes with it.
        is_used: whether anything computes with it; not so the original of a copied module.
    """

    numel: int
    rows: int
    itemsize: int
    stored: int
    trains: bool
    is_embedding: bool
    unit: int
    is_used: bool


@dataclass
class Phase:
    """The forward or backward pass of a unit, in bytes.

    Attributes:
        start, end: held when it begins and ends, without the gradients that it finishes.
        early: the most before the first of them is finished.
        late: the most after that, with them; `late_lean` is without them.
        gradients: of all gradients that it finishes.
    """

    unit: int
    is_backward: bool
    start: int
    end: int = 0
    early: int = 0
    late: int = 0
    late_lean: int = 0
    gradients: int = 0

    @property
    def high(self) -> int:
        """The most that is held, with the gradients that it finishes."""
        return max(self.early, self.late)

    @property
    def lean(self) -> int:
        """The most that is held without them."""
        return max(self.early, self.late_lean)

    def shifted(self, units: int, size: int) -> "Phase":
        """Return the same phase of a later unit, with `size` more bytes held throughout."""
        names = ("start", "end", "early", "late", "late_lean")
        shifted = {name: getattr(self, name) + size for name in names}
        return replace(self, unit=self.unit + units, **shifted)


@dataclass(frozen=True)
class Profile:
    """The phases of a micro-batch in their order, and the weights of the model.

    Attributes:
        scales: bytes that quantized weights have besides themselves.
        units: number of units.
        is_tied: whether the head has the embedding's weight, which is then the tail's.
    """

    phases: list[Phase]
    weights: list[Weight]
    scales: int
    units: int
    is_tied: bool

    @property
    def trained(self) -> list[Weight]:
        """The weights that are trained."""
        return [weight for weight in self.weights if weight.trains]


# ---- Live bytes ----
class Live(TorchDispatchMode):
    """The bytes of all tensors that ops have returned and that are still referred to.

    Attributes:
        now: bytes that are held.
        finished: bytes of finished gradients among them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.finished = 0
        self._high = self._lean = 0
        self._sizes: dict[int, int] = {}

    def see(self, tensor: torch.Tensor, counts: bool = True) -> None:
        """Count a tensor's storage until it is freed. counts: whether its bytes do."""
        tensor = getattr(tensor, "_local_tensor", tensor)
        storage = tensor.untyped_storage()
        key = storage._cdata
        if tensor.device.type == "meta" or key in self._sizes:
            return
        self._sizes[key] = storage.nbytes() if counts else 0
        self.now += self._sizes[key]
        self._high = max(self._high, self.now)
        self._lean = max(self._lean, self.now - self.finished)
        weakref.finalize(storage, self._gone, key)

    def _gone(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def lap(self) -> tuple[int, int]:
        """Return the most bytes since the last call, and the most without finished gradients."""
        found = self._high, self._lean
        self._high = self.now
        self._lean = self.now - self.finished
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # Its local tensors are seen.
        if func is WAIT:
            return args[0]  # The fake collective would return a second tensor.
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.see(leaf)
        return out


class Recorder:
    """Cuts a micro-batch into phases, and those into passes.

    Args:
        model: on fake tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.passes: list[list[Phase]] = []
        self.live = Live()
        self.parameters = list(model.parameters())
        for tensor in [*self.parameters, *model.buffers()]:
            self.live.see(tensor, counts=False)
        for weight in self.parameters:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._arrived)
        base = base_model_of(model)
        base.get_input_embeddings().register_forward_pre_hook(self._embedding)
        layers = list(layers_of(base))
        self.tail = len(layers) + 1
        for unit, layer in enumerate(layers, 1):
            layer.register_forward_pre_hook(partial(self._enter, unit), with_kwargs=True)
        layers[-1].register_forward_hook(lambda _, args, out: self._enter(self.tail, None, out))

    @property
    def phase(self) -> Phase:
        """The current phase."""
        return self.passes[-1][-1]

    def run(
        self, micro_batch: AbstractContextManager[torch.Tensor], trains: bool
    ) -> list[list[Phase]]:
        """Return the phases of each forward pass and, if it trains, of the backward pass."""
        with self.live, torch.set_grad_enabled(trains):
            self._begin(0, is_backward=False)
            with micro_batch as loss:
                if trains:
                    self._begin(self.tail, is_backward=True)
                    loss.backward()
                self._end()
        return self.passes

    def _begin(self, unit: int, is_backward: bool) -> None:
        if self.passes:
            self._end()
        if unit == (self.tail if is_backward else 0):
            self.passes.append([])
        self.passes[-1].append(Phase(unit, is_backward, start=self.live.now))

    def _end(self) -> None:
        """Close the current phase, and take the gradients that it has finished."""
        phase = self.phase
        if self.live.finished:
            phase.late, phase.late_lean = self.live.lap()
        else:
            phase.early, _ = self.live.lap()
        for weight in self.parameters:
            if weight.grad is not None:
                phase.gradients += bytes_of(weight.grad)
                weight.grad = None
        self.live.finished = 0
        phase.end = self.live.now
        self.live.lap()

    def _arrived(self, weight: torch.nn.Parameter) -> None:
        """Called when the gradient of a weight is finished."""
        if not self.live.finished:
            self.phase.early, _ = self.live.lap()
        assert weight.grad is not None
        self.live.finished += bytes_of(weight.grad)

    def _embedding(self, module: torch.nn.Module, args: Any) -> None:
        """Begin another forward pass, as that of a reference is."""
        if not self.phase.is_backward and self.phase.unit > 0:
            self._begin(0, is_backward=False)

    def _enter(self, unit: int, module: Any, *inputs: Any) -> None:
        """Begin the forward pass of a unit, and mark the first of its inputs: its hidden states.

        When their gradient is there, the backward pass of the unit before begins.
        """
        if self.phase.is_backward:  # It is computed again.
            return
        self._begin(unit, is_backward=False)
        hidden = next(leaf for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor))
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._begin(unit - 1, is_backward=True))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage of a tensor, of a DTensor that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes()


# ---- A micro-batch ----
class FakeTensors(FakeTensorMode):
    """A FakeTensorMode that peft's copies of tensors, for --modules_to_save, share."""

    def __deepcopy__(self, memo: Any) -> "FakeTensors":
        return self


def profile_of(plan: Plan, batch: Batch, trains: bool = True) -> Profile:
    """Return the profile of a micro-batch on the first rank, which is trained on, or evaluated.

    Raises End for what the recipe refuses, and for a model that takes no fake tensors.
    """
    torch.set_num_threads(1)
    batch = batch.part(plan.sp)
    accepting = libraries_that_take_fakes(plan, batch.is_packed)
    try:
        with first_rank(plan) as layout, FakeTensors(), accepting:
            model, left_out = load(plan, layout)
            weights, is_tied = weights_of(model, plan, left_out)
            layers = layers_of(base_model_of(model))
            scales = scales_of(model) + left_out * scales_of(layers[MIDDLE - 1 : MIDDLE])
            if plan.casts_to is not None:
                floats = [one for one in model.parameters() if one.dtype.is_floating_point]
                torch.nn.ParameterList(floats).to(plan.casts_to)
            token_loss = LossInHead(model, plan.args.max_logits_mib, layout.device)
            if plan.cp > 1:
                _attach_context_parallel_hooks(model)
            micro_batch = loss_of(plan, model.train(trains), token_loss, layout, batch)
            phases = stretched(Recorder(model).run(micro_batch, trains), left_out)
    except Exception as error:  # A model's own kernels may fail in any way on fake tensors
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise End(Exit.USAGE, f"cannot be traced, so {REHEARSE}: {reason}") from None
    return Profile(phases, weights, scales, len(layers) + left_out + 2, is_tied)


def weights_of(model: Any, plan: Plan, left_out: int) -> tuple[list[Weight], bool]:
    """Return the weights of a model as it is loaded, tied ones once, and whether its head is tied.

    accelerate keeps what FSDP trains in mixed precision in fp32.

    Args:
        model: with what the recipe adds to it.
        left_out: layers that it lacks, and that are as the middle one.
    """
    base = base_model_of(model)
    layers = layers_of(base)
    embedding = base.get_input_embeddings()
    head = base.get_output_embeddings()
    tail = len(layers) + 1
    unit_of = dict.fromkeys(embedding.parameters(), 0)
    is_tied = head is not None and any(weight in unit_of for weight in head.parameters())
    if is_tied:
        unit_of = {}
    for number, layer in enumerate(layers):
        unit_of |= dict.fromkeys(layer.parameters(), number + 1)
    of_embeddings = set()
    unused = set()
    for module in model.modules():
        if isinstance(module, torch.nn.Embedding):
            of_embeddings.update(module.parameters(recurse=False))
        if "original_module" in module._modules:  # peft made a copy of it
            unused.update(module.original_module.parameters())
    weights = []
    for weight in model.parameters():
        own = getattr(weight, "_local_tensor", weight)
        itemsize = stored = weight.element_size()
        if plan.casts_to is not None and weight.dtype.is_floating_point:
            itemsize = plan.casts_to.itemsize
        if plan.engine == "zero":
            stored = itemsize
        elif plan.casts_to is not None and weight.requires_grad:
            stored = FP32
        unit = unit_of.get(weight, tail)
        first = Weight(
            numel=own.numel(),
            rows=own.shape[0] if own.dim() else 1,
            itemsize=itemsize,
            stored=stored,
            trains=weight.requires_grad,
            is_embedding=weight in of_embeddings,
            unit=unit + left_out if unit > MIDDLE else unit,
            is_used=weight not in unused,
        )
        number = left_out + 1 if unit == MIDDLE else 1
        weights += [replace(first, unit=first.unit + place) for place in range(number)]
    return weights, is_tied


def scales_of(module: torch.nn.Module) -> int:
    """Return the bytes that quantized weights in a module have besides themselves."""
    parts = list(module.modules())
    size = sum(part.scale_bytes for part in parts if isinstance(part, Quantized))
    return size + sum(bytes_of(part.row_scale) for part in parts if isinstance(part, Float8Linear))


# ---- All layers ----
def stretched(passes: list[list[Phase]], left_out: int) -> list[Phase]:
    """Return the phases of a model with all its layers, of which `left_out` were not traced.

    What a layer keeps is the difference between its input and that of the next one: in a forward
    pass autocast's copies of weights are part of it, which the backward pass no longer has.
    """
    phases: list[Phase] = []
    for one_pass in passes:
        starts = {phase.unit: phase.start for phase in one_pass}
        kept = starts[MIDDLE + 1] - starts[MIDDLE] if left_out else 0
        for phase in one_pass:
            if phase.unit < MIDDLE:
                phases.append(phase)
            elif phase.unit > MIDDLE:
                phases.append(phase.shifted(left_out, left_out * kept))
            else:
                copies = [phase.shifted(place, place * kept) for place in range(left_out + 1)]
                phases += reversed(copies) if phase.is_backward else copies
    return phases
