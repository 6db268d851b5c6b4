# SPDX-License-Identifier: Apache-2.0
"""One micro-batch of a recipe on fake tensors, as a Profile: its phases and its weights.

The recipe's own `load_model` makes the model from its config, and the recipe's own loss runs over
it under torch's FakeTensorMode, where tensors are allocated and freed as real ones are. The pass is
cut at the inputs of the decoder's layers. A phase is the forward or backward pass of a unit: the
embedding (unit 0), each layer, and the tail (final norm, head and loss). Where all layers are
alike, three are traced, and the middle one stands for all between the first and the last.

Bytes of a phase are those of all tensors but weights and buffers of the model.
"""

import contextlib
import io
import logging
import warnings
import weakref
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core.loss import LossInHead
from core.model import base_model_of

from .model import Quantized, layers_of, libraries_that_take_fakes, load, loss_of, make_fake
from .plan import Plan, first_rank
from .request import Batch, refusing_as_the_recipe

WAIT = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Weight:
    """A parameter of the model, or what the first rank has of one that ranks split.

    Attributes:
        numel: elements.
        whole: elements on all ranks together.
        rows: its first dimension, by which FSDP2 shards it.
        itemsize: bytes per element in which the model computes with it.
        loaded: bytes per element as the recipe loads it.
        trains, is_embedding: whether it is trained, and whether it is an embedding's.
        unit: the phase's unit that computes with it.
        is_used: whether anything computes with it; not so the original of a copied module.
    """

    numel: int
    whole: int
    rows: int
    itemsize: int
    loaded: int
    trains: bool
    is_embedding: bool
    unit: int
    is_used: bool = True


@dataclass(frozen=True)
class Phase:
    """The forward or backward pass of a unit, in bytes.

    Attributes:
        start, end: held when it begins and ends, without the gradients that it finishes.
        high: the most that is held, with these gradients; `lean` is without them.
        early: the most before the first of them is finished; `late`, `lean_late`: after that.
        gradients: of all gradients that it finishes.
    """

    unit: int
    is_backward: bool
    start: int
    end: int = 0
    high: int = 0
    lean: int = 0
    early: int = 0
    late: int = 0
    lean_late: int = 0
    gradients: int = 0

    def shifted(self, unit: int, shift: int) -> "Phase":
        """Return the same phase of another unit, with `shift` more bytes held throughout."""
        names = ["start", "end", "high", "lean", "early"]
        names += ["late", "lean_late"] if self.gradients else []
        return replace(self, unit=unit, **{name: getattr(self, name) + shift for name in names})


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
    """Cuts what runs within `recording` into phases.

    Args:
        model: on fake tensors.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self.phases: list[Phase] = []
        self.live = Live()
        self.parameters = list(model.parameters())
        for tensor in [*self.parameters, *model.buffers()]:
            self.live.see(tensor, counts=False)
        for weight in self.parameters:
            if weight.requires_grad:
                weight.register_post_accumulate_grad_hook(self._arrived)
        base = base_model_of(model)
        base.get_input_embeddings().register_forward_pre_hook(self._embedding)
        self.layers = list(layers_of(base))
        for number, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._entering(number + 1), with_kwargs=True)
        self.layers[-1].register_forward_hook(self._leaving)

    def run(self, micro_batch: AbstractContextManager[torch.Tensor], trains: bool) -> list[Phase]:
        """Return the phases of a forward pass and, if it trains, its backward pass."""
        with self.live, torch.set_grad_enabled(trains):
            self._begin(0, is_backward=False)
            with micro_batch as loss:
                if trains:
                    self._begin(len(self.layers) + 1, is_backward=True)
                    loss.backward()
                self._end()
        return self.phases

    # ---- Cuts ----
    def _begin(self, unit: int, is_backward: bool) -> None:
        self._end()
        self.phases.append(Phase(unit, is_backward, start=self.live.now))

    def _end(self) -> None:
        """Close the current phase, and take the gradients that it has finished."""
        if not self.phases:
            return
        self._lap()
        gradients = self.phases[-1].gradients
        for weight in self.parameters:
            if weight.grad is not None:
                gradients += bytes_of(weight.grad)
                weight.grad = None
        self.live.finished = 0
        self.phases[-1] = replace(self.phases[-1], end=self.live.now, gradients=gradients)
        self.live.lap()

    def _lap(self) -> None:
        """Note what was held since the last lap, before or after the first finished gradient."""
        phase = self.phases[-1]
        high, lean = self.live.lap()
        changes: dict[str, Any] = {"high": max(phase.high, high), "lean": max(phase.lean, lean)}
        if self.live.finished:
            changes |= {"late": max(phase.late, high), "lean_late": max(phase.lean_late, lean)}
        else:
            changes["early"] = high
        self.phases[-1] = replace(phase, **changes)

    def _arrived(self, weight: torch.nn.Parameter) -> None:
        """Called when the gradient of a weight is finished."""
        if not self.live.finished:
            self._lap()
        assert weight.grad is not None
        self.live.finished += bytes_of(weight.grad)

    def _embedding(self, module: torch.nn.Module, args: Any) -> None:
        """Begin another forward pass, as that of a reference is."""
        last = self.phases[-1]
        if not last.is_backward and last.unit > 0:
            self._begin(0, is_backward=False)

    def _entering(self, unit: int) -> Callable[..., None]:
        """Return a hook that begins the forward pass of a layer, and marks its input.

        When the gradient of the input is there, the backward pass of the unit before begins.
        """

        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            if self.phases[-1].is_backward:  # It is computed again.
                return
            self._begin(unit, is_backward=False)
            hidden = first_tensor(args, kwargs)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: self._begin(unit - 1, is_backward=True))

        return hook

    def _leaving(self, module: torch.nn.Module, args: Any, out: Any) -> None:
        """Begin the tail once the last layer is computed."""
        if self.phases[-1].is_backward:
            return
        last = len(self.layers)
        self._begin(last + 1, is_backward=False)
        hidden = first_tensor([out], {})
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: self._begin(last, is_backward=True))


def bytes_of(tensor: torch.Tensor) -> int:
    """Return the bytes of the storage of a tensor, of a DTensor that of this rank's part."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage().nbytes()


def first_tensor(args: Any, kwargs: Any) -> torch.Tensor:
    """Return the first tensor of a module's input or output: its hidden states."""
    return next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))


# ---- A micro-batch ----
def profile_of(plan: Plan, batch: Batch | None, trains: bool = True) -> Profile:
    """Return the profile of a micro-batch on the first rank.

    Args:
        batch: None leaves out the phases, which take most of the time.
        trains: whether it is trained on, or only evaluated.

    Raises:
        UnplannableError: for what the recipe refuses, and for a model that takes no fake tensors.
    """
    torch.set_num_threads(1)
    with refusing_as_the_recipe(), quiet(), first_rank(plan) as layout:
        model, left_out = load(plan, layout)
        layers = layers_of(base_model_of(model))
        weights, is_tied = weights_of(model, plan)
        scales = scales_of(model)
        if left_out:
            scales += left_out * scales_of(layers[1])
        phases = []
        if batch is not None:
            part = batch.part(plan.sp)
            with libraries_that_take_fakes(plan, part), FakeTensorMode():
                phases = phases_of(plan, make_fake(model, plan), layout, part, trains)
    return Profile(
        stretched_phases(phases, left_out),
        stretched_weights(weights, left_out),
        scales,
        len(layers) + left_out + 2,
        is_tied,
    )


def phases_of(plan: Plan, model: Any, layout: Any, batch: Batch, trains: bool) -> list[Phase]:
    """Return the phases of a micro-batch. Call it under FakeTensorMode.

    Args:
        model: with what the recipe adds to it, on fake tensors.
        layout: of the first rank.
    """
    token_loss = LossInHead(model, plan.args.max_logits_mib, layout.device)
    if plan.cp > 1:
        _attach_context_parallel_hooks(model)
    model.train(trains)
    micro_batch = loss_of(plan, model, token_loss, layout, batch)
    return Recorder(model).run(micro_batch, trains)


@contextlib.contextmanager
def quiet() -> Generator[None]:
    """Silence what libraries print and warn of, and what torch logs before it raises."""
    level = transformers.logging.get_verbosity()
    torch_level = logging.getLogger("torch").level
    transformers.logging.set_verbosity_error()
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)
            logging.getLogger("torch").setLevel(torch_level)


def weights_of(model: Any, plan: Plan) -> tuple[list[Weight], bool]:
    """Return the weights of a model as it is loaded, tied ones once, and whether its head is tied.

    Args:
        model: with what the recipe adds to it.
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
        loaded = weight.element_size()
        is_cast = plan.casts and weight.dtype.is_floating_point
        weights.append(
            Weight(
                numel=own.numel(),
                whole=weight.numel(),
                rows=own.shape[0] if own.dim() else 1,
                itemsize=plan.low.itemsize if is_cast and plan.low else loaded,
                loaded=loaded,
                trains=weight.requires_grad,
                is_embedding=weight in of_embeddings,
                unit=unit_of.get(weight, tail),
                is_used=weight not in unused,
            )
        )
    return weights, is_tied


def scales_of(module: torch.nn.Module) -> int:
    """Return the bytes that quantized weights in a module have besides themselves."""
    quantized = [part for part in module.modules() if isinstance(part, Quantized)]
    return sum(scale.nbytes for part in quantized for scale in part.buffers())


# ---- All layers ----
MIDDLE = 2  # the unit of the middle one of three layers, which stands for those that are left out


def stretched_phases(traced: list[Phase], left_out: int) -> list[Phase]:
    """Return the phases of a model with all its layers, of which `left_out` were not traced.

    What a layer keeps is the difference between its input and that of the next one: in a forward
    pass autocast's copies of weights are part of it, which the backward pass no longer has.
    """
    phases: list[Phase] = []
    for one_pass in passes_of(traced):
        starts = {phase.unit: phase.start for phase in one_pass}
        kept = starts[MIDDLE + 1] - starts[MIDDLE] if left_out else 0
        for phase in one_pass:
            if phase.unit < MIDDLE:
                phases.append(phase)
            elif phase.unit > MIDDLE:
                phases.append(phase.shifted(phase.unit + left_out, left_out * kept))
            else:
                places = range(left_out + 1)
                for place in reversed(places) if phase.is_backward else places:
                    phases.append(phase.shifted(MIDDLE + place, place * kept))
    return phases


def stretched_weights(traced: list[Weight], left_out: int) -> list[Weight]:
    """Return the weights of a model with all its layers."""
    weights = []
    for weight in traced:
        if weight.unit == MIDDLE:
            weights += [replace(weight, unit=MIDDLE + place) for place in range(left_out + 1)]
        else:
            more = left_out if weight.unit > MIDDLE else 0
            weights.append(replace(weight, unit=weight.unit + more))
    return weights


def passes_of(phases: list[Phase]) -> list[list[Phase]]:
    """Return the phases of each forward pass, and of the backward pass."""
    passes: list[list[Phase]] = []
    was_backward = False
    for phase in phases:
        begins = phase.is_backward and not was_backward
        if begins or (phase.unit == 0 and not phase.is_backward):
            passes.append([])
        passes[-1].append(phase)
        was_backward = phase.is_backward
    return passes
