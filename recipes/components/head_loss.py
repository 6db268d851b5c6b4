"""Cross-entropy without the logits of prompts and padding, in pieces where they are many.

The logits of a batch are often its largest tensor: 8 rows of 1,024 tokens with a vocabulary of
128,256 take 4 GiB in fp32, and their gradient as much. Only tokens that are trained on need any.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint as recompute

# Of a GPU's memory, for fp32 logits at a time: 1.25 GiB of 80; for a moment the loss takes about
# three times that
LOGITS_SHARE = 1 / 64
LOGITS_MIB_ON_A_CPU = 256


def logits_mib(max_logits_mib: float | None, device: torch.device) -> float:
    """Return how many MiB of fp32 logits are computed at a time.

    The share is of a GPU's whole memory, not of what is free, so that a resumed run and the memory
    planner find the same.
    """
    if max_logits_mib is not None:
        return max_logits_mib
    if device.type != "cuda":
        return LOGITS_MIB_ON_A_CPU
    return LOGITS_SHARE * torch.cuda.get_device_properties(device).total_memory / 2**20


class LossInHead:
    """The loss of the tokens that are trained on, computed inside of the model's output head.

    Inside of the head every strategy has its weight whole, and gathers it once. Positions and
    targets reach it through this object, past the model's own forward. A model that changes its
    logits after its head (Gemma 2, Granite, Cohere) gets those of these tokens only, and their loss
    is computed from its output.
    """

    def __init__(
        self, model: Any, max_logits_mib: float | None, device: torch.device | None = None
    ) -> None:
        """Replace the forward of the model's output head. To be called before `prepare`.

        Args:
            max_logits_mib: MiB of fp32 logits that are held at a time; None for a share of the
                memory of `device`.
        """
        vocabulary = model.get_input_embeddings().num_embeddings
        mib = logits_mib(max_logits_mib, device or torch.device("cpu"))
        self._head = model.get_output_embeddings()
        self._logits_of = self._head.forward
        self._tokens_at_a_time = max(int(mib * 2**20 / (4 * vocabulary)), 1)
        self._head_comes_last = head_comes_last(model)
        # Others have adapters, or are quantized
        self._is_linear = type(self._head) is torch.nn.Linear
        self._positions = torch.empty(0, dtype=torch.long)
        self._targets = torch.empty(0, dtype=torch.long)
        self._head.forward = torch.compiler.disable(self._forward_of_head)

    def __str__(self) -> str:
        """Say how the loss is computed, for the start summary."""
        if not self._head_comes_last:
            return "logits of trained tokens only, which the model changes after its head"
        return f"logits of trained tokens only, {self._tokens_at_a_time:,} at a time"

    def __call__(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the cross-entropy summed over a batch's tokens, in nats and fp32.

        Args:
            batch: inputs, positions and targets, as components.packing.TokenCollator makes them.
        """
        losses, _ = self.run(model, batch["inputs"], batch["positions"], batch["targets"])
        return losses.sum()

    def run(
        self,
        model: torch.nn.Module,
        inputs: Mapping[str, Any],
        positions: torch.Tensor,
        targets: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Return the cross-entropy of each token, [n], in nats and fp32, and the model's output.

        Args:
            inputs: what the model takes, [lines, tokens].
            positions: [n], in the flattened lines, of the tokens whose next one is predicted.
            targets: [n], those next tokens.
            options: further arguments of the model.
        """
        self._positions = positions
        self._targets = targets
        output = model(**inputs, use_cache=False, **options)
        if self._head_comes_last:
            return output.logits, output
        return self._cross_entropy(output.logits, targets), output

    def _forward_of_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return losses, [n], or logits, [n, vocabulary], in place of all logits.

        Args:
            hidden: [lines, tokens, features].
        """
        hidden = hidden.flatten(0, 1)[self._positions]
        targets = self._targets
        if not self._head_comes_last:
            return self._logits_of(hidden)
        size = self._tokens_at_a_time
        if len(targets) <= size:
            return self._losses_of(hidden, targets)
        if self._is_linear:
            # Read here: FSDP makes another tensor of the weight during the forward pass
            weight, bias = self._head.weight, self._head.bias
            return LossInPieces.apply(hidden, weight, bias, targets, size)
        losses = []
        for part, part_targets in zip(hidden.split(size), targets.split(size), strict=True):
            losses.append(recompute(self._losses_of, part, part_targets, use_reentrant=False))
        return torch.cat(losses)

    def _losses_of(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the cross-entropy of each token, [n], by the head's own forward."""
        return self._cross_entropy(self._logits_of(hidden), targets)

    @staticmethod
    def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(logits.float(), targets, reduction="none")


def head_comes_last(model: Any) -> bool:
    """Return whether a causal language model returns what its output head returns, unchanged.

    The model is run on one token, with a body and a head that compute nothing.
    """
    inner = model
    if hasattr(model, "get_base_model"):  # peft's
        inner = model.get_base_model()
    probe = torch.zeros(1, 1, 1)
    body = replaced_forward(inner.base_model, lambda *_, **__: BodyOutput(probe))
    head = replaced_forward(model.get_output_embeddings(), lambda _: probe)
    with body, head:
        return inner(input_ids=torch.zeros(1, 1, dtype=torch.long)).logits is probe


class BodyOutput:
    """What a model's body returns, with None for all that a probe does not need."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, place: int) -> torch.Tensor:
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


@contextlib.contextmanager
def replaced_forward(module: torch.nn.Module, forward: Callable) -> Iterator[None]:
    """Give a module another forward within this context."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


class LossInPieces(torch.autograd.Function):
    """Cross-entropy of each token under a linear head, with never more than a piece of the logits.

    Its arguments are hidden, [tokens, features]; weight, [vocabulary, features], and bias,
    [vocabulary] or None, of the head; targets, [tokens]; and the tokens of a piece. It returns nats
    in fp32, [tokens].

    The backward pass computes each piece again, as torch.utils.checkpoint does, but adds up the
    pieces' gradients of weight and bias in fp32 and rounds once. Autograd would add them in the
    type that was multiplied: in bf16 each piece then brings a rounding error of its own. Nothing is
    added up for a frozen head.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        piece: int,
    ) -> torch.Tensor:
        device_type = hidden.device.type
        autocasts = torch.is_autocast_enabled(device_type)
        ctx.compute_dtype = torch.get_autocast_dtype(device_type) if autocasts else None
        ctx.piece = piece
        ctx.save_for_backward(hidden, weight, bias, targets)
        # Cast here, once: autocast would keep a cast that was made without gradients, and hand it to
        # the next user of the weight.
        weight = cast(weight, ctx.compute_dtype)
        bias = cast(bias, ctx.compute_dtype)
        losses = []
        for start in range(0, len(targets), piece):
            part = slice(start, start + piece)
            hidden_part = cast(hidden[part], ctx.compute_dtype)
            losses.append(losses_of(hidden_part, weight, bias, targets[part]))
        return torch.cat(losses)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = zeros_to_add_to(weight) if wants_weight else None
        of_bias = zeros_to_add_to(bias) if wants_bias else None
        weight_used = cast(weight, ctx.compute_dtype).requires_grad_(wants_weight)
        bias_used = cast(bias, ctx.compute_dtype)
        if wants_bias:
            bias_used.requires_grad_()

        for start in reversed(
            range(0, len(targets), ctx.piece)
        ):  # the order in which autograd adds up
            part = slice(start, start + ctx.piece)
            hidden_part = cast(hidden[part], ctx.compute_dtype).requires_grad_(wants_hidden)
            with torch.enable_grad(), torch.autocast(hidden.device.type, enabled=False):
                losses = losses_of(hidden_part, weight_used, bias_used, targets[part])
            inputs = (hidden_part, weight_used, bias_used)
            wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
            found = list(torch.autograd.grad(losses, wanted, gradient[part]))
            del losses
            if wants_hidden:
                of_hidden[part] = found.pop(0)
            if wants_weight:
                of_weight += found.pop(0)
            if wants_bias:
                of_bias += found.pop(0)

        if wants_weight:
            of_weight = of_weight.to(weight.dtype)
        if wants_bias:
            of_bias = of_bias.to(bias.dtype)
        return of_hidden, of_weight, of_bias, None, None


def cast(tensor: Any, dtype: torch.dtype | None) -> Any:
    """Return the tensor without its history, in `dtype` unless that is None; None for no tensor."""
    if tensor is None:
        return None
    return tensor.detach().to(dtype or tensor.dtype)


def zeros_to_add_to(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the tensor's shape in fp32, or in fp64 for a tensor in fp64."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def losses_of(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, targets: torch.Tensor
) -> torch.Tensor:
    """Return the cross-entropy of each token in nats and fp32, [tokens], from its hidden state."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.float()  # under the same name, so that those in bf16 are let go at once
    return cross_entropy(logits, targets, reduction="none")
