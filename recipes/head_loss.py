"""The loss of an output head in pieces, so that all logits are never there at once, with exact gradients in bf16.

The recipes of language models use this file when it lies beside them; copied alone they recompute
pieces by torch.utils.checkpoint, whose gradients of the head are rounded once per piece.
"""

import torch
from torch.nn.functional import cross_entropy


class LossInPieces(torch.autograd.Function):
    """The cross-entropy of each token under an output head, with never more than `piece` rows of logits at a time.

    hidden: [tokens, features]. weight: [vocabulary, features] and bias: [vocabulary] or None, of the head.
    targets: [tokens]. Returns nats in fp32, [tokens].

    The backward pass computes each piece again, as torch.utils.checkpoint does, but adds up the pieces'
    gradients of weight and bias in fp32 and rounds once. Autograd would add them in the type that was
    multiplied: in bf16 each piece then brings a rounding error of its own. Nothing is added up for a
    frozen head.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, targets, piece):
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
    def backward(ctx, gradient):
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


def cast(tensor, dtype):
    """Return the tensor without its history, in `dtype` unless that is None; None for no tensor."""
    if tensor is None:
        return None
    return tensor.detach().to(dtype or tensor.dtype)


def zeros_to_add_to(tensor):
    """Return zeros of the tensor's shape in fp32, or in fp64 for a tensor in fp64."""
    return torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))


def losses_of(hidden, weight, bias, targets):
    """Return the cross-entropy of each token in nats and fp32, [tokens], from its hidden state."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits.float()  # under the same name, so that those in bf16 are let go at once
    return cross_entropy(logits, targets, reduction="none")
