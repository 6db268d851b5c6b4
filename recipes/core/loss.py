# SPDX-License-Identifier: Apache-2.0
"""The loss of causal language models, computed inside their output head.

Only the logits of tokens that are trained on are computed, and never more of them at a time than
--max_logits_mib allows. Inside the head's forward pass every strategy has its weight whole.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from core.engine import Layout
from core.run import Run

# What fp32 logits may take at a time. For a moment the loss takes about three times as much.
LOGITS_SHARE = 1 / 64  # of a GPU's memory: 1.25 GiB of 80
LOGITS_MIB_ON_CPU = 256
LossesOf = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of logits and targets


def token_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each token in nats, [tokens]. EDIT: label smoothing, a z-loss.

    Every path to the loss of training ends here. Logits are [tokens, vocabulary], in fp32.
    """
    return cross_entropy(logits, targets, reduction="none")


def evaluated_losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy that evaluations log, whatever `token_losses` returns."""
    return cross_entropy(logits.float(), targets, reduction="none")


def losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return `token_losses` of logits in any dtype."""
    logits = logits.float()  # The same name, so that the bf16 logits are freed at once.
    return token_losses(logits, targets)


compiled = torch.compile(losses_of)  # when it is first called


def compiled_losses_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return `losses_of` these, compiled once for any number of tokens. No fp32 logits are kept."""
    if len(targets) < 2:  # torch would compile again
        return losses_of(logits, targets)
    for tensor in (logits, targets):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return compiled(logits, targets)


def logits_mib(max_logits_mib: float | None, device: torch.device) -> float:
    """Return how many MiB of fp32 logits are held at a time: --max_logits_mib, or the default."""
    if max_logits_mib is not None:
        return max_logits_mib
    if device.type != "cuda":
        return LOGITS_MIB_ON_CPU
    return LOGITS_SHARE * torch.cuda.get_device_properties(device).total_memory / 2**20


class LossInHead:
    """The cross-entropy of the tokens that are trained on, returned by the model's output head.

    While losses are requested, the head returns that of each token in place of logits. If the model
    changes its logits after its head (Gemma 2, Granite, Cohere), the head returns the logits of the
    tokens that are trained on. Create it after adapters are added and before `prepare`.
    """

    def __init__(
        self,
        model: Any,
        max_logits_mib: float | None,
        device: torch.device,
        compiles: bool = False,
    ) -> None:
        """Replace the forward pass of the model's output head.

        Args:
            max_logits_mib: as in `logits_mib`.
            device: the device that the model will be on.
            compiles: whether to compile what follows the head's product.
        """
        self._losses_of: LossesOf = compiled_losses_of if compiles else losses_of
        self._evaluated_losses_of: LossesOf = evaluated_losses_of
        self._model_changes_logits = changes_logits_after_head(model)
        # The embedding has it, while ZeRO-3 has already split the head's weight.
        vocabulary = model.get_input_embeddings().num_embeddings
        mib = logits_mib(max_logits_mib, device)
        self._piece = max(int(mib * 2**20 / (4 * vocabulary)), 1)  # tokens
        self._request: tuple[torch.Tensor, torch.Tensor] | None = None
        head = model.get_output_embeddings()
        layers = [head]
        if hasattr(head, "modules_to_save"):
            # peft runs the copy, or the original where adapters are disabled. FSDP1 and ZeRO-3
            # gather the weights of the one that runs, around its forward pass.
            layers = [head.original_module, *head.modules_to_save.values()]
        for layer in layers:
            forward = partial(self._forward_of_head, layer, layer.forward)
            # The number of tokens differs from batch to batch, so that only the loss is compiled.
            layer.forward = torch.compiler.disable(forward)

    def __str__(self) -> str:
        how = f"{self._piece:,} at a time"
        if self._model_changes_logits:
            how = "which the model changes after its head"
        return f"logits only of tokens that are trained on, {how}"

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the cross-entropy summed over the tokens of a batch, in nats and fp32."""
        losses, _ = self.losses(model, batch)
        return losses.sum()

    def losses(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the cross-entropy of each token in nats and fp32, [tokens], and all of the output.

        Args:
            batch: with `inputs`, `positions` and `targets`, as core.batches.TokenCollator makes it.
        """
        # Kept until the next one, since the backward pass may compute the head again: FSDP's
        # activation checkpointing can wrap it.
        self._request = (batch["positions"], batch["targets"])
        output = model(**batch["inputs"], use_cache=False)
        losses = output.logits
        if self._model_changes_logits:
            losses = self._losses_in(model)(output.logits, batch["targets"])
        return losses, output

    def _losses_in(self, module: torch.nn.Module) -> LossesOf:
        """Return what has the losses of logits and targets: of training, or of an evaluation."""
        return self._losses_of if module.training else self._evaluated_losses_of

    def return_logits(self) -> None:
        """Have the head return logits from now on, until losses are requested again."""
        self._request = None

    def _forward_of_head(
        self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        """Return the requested losses, or the logits if the model has to change them.

        Args:
            forward: that of the layer, which this replaces.
            hidden: [lines, tokens, features].
        """
        if self._request is None:
            return forward(hidden)
        positions, targets = self._request
        hidden = hidden.flatten(0, 1)[positions]
        if self._model_changes_logits:
            return forward(hidden)

        losses_of = self._losses_in(layer)

        def losses(hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return losses_of(forward(hidden), targets)

        if len(targets) <= self._piece:
            return losses(hidden, targets)
        # No adapters, not quantized, not split by tensor parallelism; FSDP2 makes it a subclass
        is_linear = type(layer).forward is torch.nn.Linear.forward
        if is_linear and not isinstance(layer.weight, DTensor):
            # The weight is read here, since FSDP has it whole only during the forward pass.
            weights = layer.weight, layer.bias
            return LossInPieces.apply(hidden, *weights, targets, self._piece, losses_of)
        parts = zip(hidden.split(self._piece), targets.split(self._piece), strict=True)
        return torch.cat([checkpoint(losses, *part, use_reentrant=False) for part in parts])


# ---- Does the model change its logits after its head? ----
class HiddenStates:
    """The output of a model's body, reduced to its last hidden states; everything else is None."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


def changes_logits_after_head(model: Any) -> bool:
    """Return whether a model caps or scales what its output head returns.

    Nothing is computed: body, head and what may stand between them (ModernBERT's decoder has a
    layer there) pass on a marker. A model that changes no logits outputs that very tensor.
    """
    if hasattr(model, "get_base_model"):  # It is wrapped by peft.
        model = model.get_base_model()
    marker = torch.zeros(1, 1, 1)
    head = model.get_output_embeddings()
    without_head = [child for child in model.children() if head not in child.modules()]
    outputs: dict[Any, Any] = dict.fromkeys([head, *without_head], marker)
    outputs[model.base_model] = HiddenStates(marker)
    with contextlib.ExitStack() as patched:
        for module, output in outputs.items():
            patched.enter_context(mock.patch.object(module, "forward", return_value=output))
        output = model(input_ids=torch.zeros(1, 1, dtype=torch.long))
    return output.logits is not marker


# ---- In pieces ----
class LossInPieces(torch.autograd.Function):
    """The cross-entropy of each token under an output head, with the logits of few at a time.

    The backward pass computes each piece again, as torch.utils.checkpoint does, but adds up the
    pieces' gradients of weight and bias in fp32 and rounds once. Autograd would add them in the
    dtype of the product: in bf16 each piece would add a rounding error. For a frozen head nothing
    is added up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        piece: int,
        losses_of: LossesOf,
    ) -> torch.Tensor:
        """Return the losses of all tokens, [tokens], in nats and fp32.

        Args:
            hidden: [tokens, features].
            weight, bias: of the head, [vocabulary, features] and [vocabulary] or None.
            piece: tokens whose logits are held at a time.
            losses_of: returns the losses of logits and targets.
        """
        ctx.dtype = None
        if torch.is_autocast_enabled(hidden.device.type):
            ctx.dtype = torch.get_autocast_dtype(hidden.device.type)
        ctx.piece = piece
        ctx.losses_of = losses_of
        ctx.save_for_backward(hidden, weight, bias, targets)
        # Cast here, once: autocast would cache a cast that was made without gradients, and reuse it
        # wherever the weight is used next.
        weight = cast(weight, ctx.dtype)
        bias = cast(bias, ctx.dtype)
        losses = []
        for part, wanted in zip(hidden.split(piece), targets.split(piece), strict=True):
            losses.append(losses_of(linear(cast(part, ctx.dtype), weight, bias), wanted))
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    # pyrefly: ignore[bad-override]  # once_differentiable hides the name of its first argument
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        """Return the gradients of hidden states, weight and bias, None for what is frozen."""
        hidden, weight, bias, targets = ctx.saved_tensors
        _, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        hidden_gradient = torch.empty_like(hidden)
        weight_gradient: Any = zeros_to_add_to(weight) if wants_weight else None
        bias_gradient: Any = zeros_to_add_to(bias) if wants_bias else None
        weight_used = cast(weight, ctx.dtype).requires_grad_(wants_weight)
        bias_used = cast(bias, ctx.dtype)
        if wants_bias:
            bias_used.requires_grad_()

        starts = range(0, len(targets), ctx.piece)
        for start in reversed(starts):  # Autograd adds up gradients in this order.
            part = slice(start, start + ctx.piece)
            hidden_part = cast(hidden[part], ctx.dtype).requires_grad_()
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                # No name for the logits, so that `losses_of` can free them
                losses = ctx.losses_of(linear(hidden_part, weight_used, bias_used), targets[part])
            inputs = (hidden_part, weight_used, bias_used)
            trained = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            # In the order of the inputs
            gradients = list(torch.autograd.grad(losses, trained, gradient[part]))
            del losses
            hidden_gradient[part] = gradients.pop(0)
            if wants_weight:
                weight_gradient += gradients.pop(0)
            if wants_bias:
                bias_gradient += gradients.pop(0)
        # Autograd rounds them to the dtypes of weight and bias
        return hidden_gradient, weight_gradient, bias_gradient, None, None, None


def cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Return the tensor without its history, in `dtype` unless that is None; None for no tensor."""
    if tensor is None:
        return None
    return tensor.detach().to(dtype or tensor.dtype)


def zeros_to_add_to(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the tensor's shape in fp32, or in fp64 for a tensor in fp64."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


# ---- Evaluation ----
@torch.no_grad()
def evaluate_perplexity(
    run: Run,
    layout: Layout,
    model: torch.nn.Module,
    token_loss: LossInHead,
    batches: Iterable[Mapping[str, Any]],
    predictor: Any = None,
) -> None:
    """Log the loss, in nats per token trained on, and the perplexity of the evaluation batches.

    With a predictor (extras/predict), the model also answers rows, and the metrics of its answers
    are logged too.

    Args:
        batches: of this rank, as `token_loss` takes them, with the number of tokens that are
            trained on as the first of their `counts`. Every rank has the same number of batches.
    """
    model.eval()
    total = torch.zeros(2, device=layout.device)
    for batch in run.interruptible(batches):
        with layout.part_of(batch, is_training=False) as part:
            total += torch.stack([token_loss(model, part), batch["counts"][0]])
    answered: dict[str, float] = {}
    if predictor is not None:
        token_loss.return_logits()
        answered = predictor.predict(model)
    model.train()
    loss = layout.sum_over_tokens(total[0], is_training=False).item()
    mean = loss / layout.sum_over_rows(total[1]).item()
    run.log_evaluation({"eval_loss": mean, "eval_perplexity": perplexity_of(mean), **answered})


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a mean loss in nats, of which a float holds only that of 709."""
    return math.exp(min(loss, 700))
