# SPDX-License-Identifier: Apache-2.0
"""A frozen teacher, whole, in 4 bits or sharded, and a student's divergence from it, in pieces."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from core.engine import zero_stage
from core.exits import Exit, fail
from core.loss import LossInHead, changes_logits_after_head
from core.model import loading, loading_whole
from core.workarounds import fsdp_plugin, mixed_dtype

TEACHER = "--teacher_model_name_or_path"


# ---- A second model, which is not trained ----
class FrozenModel:
    """A causal language model beside the one that is trained, in two parts: its head is apart.

    accelerate leaves a second model whole, or refuses it. Here torch's fully_shard splits it over
    all ranks wherever FSDP or ZeRO-3 splits the first one, unless it is in 4 bits. Each rank has
    its head whole, since ranks differ in how many tokens they need it for.

    Attributes:
        model: without its head; its "logits" are the hidden states that the head would get.
        num_entries: of its vocabulary, those that pad it included.
    """

    def __init__(
        self, name: str, accelerator: Accelerator, dtype: str, load_in_4bit: bool, **options: Any
    ) -> None:
        """Load the model of a folder or hub id, quantized on request (nf4, bitsandbytes).

        Ends with 64 if that fails, or its head alone does not give its logits.

        Args:
            dtype: in which it computes without mixed precision.
            options: further arguments of from_pretrained.
        """
        dtype = mixed_dtype(accelerator) or dtype
        is_sharding = fsdp_plugin(accelerator) is not None or zero_stage(accelerator) == 3
        is_split = is_sharding and not load_in_4bit
        if load_in_4bit:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
        if not is_split:
            options["device_map"] = {"": accelerator.device}
        with loading("model", name, TEACHER), loading_whole(accelerator):
            model, report = AutoModelForCausalLM.from_pretrained(
                name, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
            )
        if report["missing_keys"]:
            lacking = ", ".join(sorted(report["missing_keys"])[:3])
            fail(Exit.USAGE, f"{TEACHER} {name}: its files lack weights ({lacking})")
        refuse_later_changes(changes_logits_after_head(model), f"{TEACHER} {name}")
        head = model.get_output_embeddings()
        self._head = [weight.detach().to(accelerator.device) for weight in head.parameters()]
        self.num_entries = len(self._head[0])
        model.set_output_embeddings(torch.nn.Identity())
        self.model = model.eval().requires_grad_(False)
        if is_split:
            mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,))
            names = model._no_split_modules or ()
            layers = [part for part in model.modules() if type(part).__name__ in names]
            for part in (*layers, model):
                fully_shard(part, mesh=mesh, reshard_after_forward=True)

    def hidden_states(self, batch: Mapping[str, Any]) -> torch.Tensor:
        """Return the last hidden states of the tokens that are trained on, [tokens, features]."""
        with torch.no_grad():
            hidden = self.model(**batch["inputs"], use_cache=False).logits
        return hidden.flatten(0, 1)[batch["positions"]]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of some hidden states, [tokens, vocabulary], in fp32."""
        return linear(hidden.to(self._head[0].dtype), *self._head).float()


def refuse_later_changes(changes_logits: bool, name: str) -> None:
    """End with 64 if a model changes its logits after its head, where the divergence is taken."""
    if changes_logits:
        fail(Exit.USAGE, f"{name}: changes its logits after its output head: take another model")


def check_same_tokens(name: str, tokenizer: Any) -> None:
    """End with 64 if the tokens of a teacher are not those of the student, with the same ids."""
    with loading("tokenizer", name, TEACHER):
        other: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    different = set(tokenizer.get_vocab().items()) ^ set(other.get_vocab().items())
    if different:
        fail(
            Exit.USAGE,
            f"{TEACHER} {name}: student and teacher have different tokens, such as "
            f"{min(different)[0]!r}: take a teacher with the tokenizer of the student",
        )


# ---- The loss ----
def divergence(
    student: torch.Tensor, teacher: torch.Tensor, loss_type: str, beta: float
) -> torch.Tensor:
    """Return the divergence of each token in nats, [tokens].

    Args:
        student, teacher: log-probabilities, [tokens, vocabulary].
        loss_type: forward_kl, the mean under the teacher; reverse_kl, under the student; or jsd,
            the generalized one of GKD (arXiv 2306.13649).
        beta: share of the teacher in the mixture of jsd.
    """
    if loss_type == "forward_kl":
        return (teacher.exp() * (teacher - student)).sum(-1)
    if loss_type == "reverse_kl":
        return (student.exp() * (student - teacher)).sum(-1)
    mixture = torch.logaddexp(student + math.log1p(-beta), teacher + math.log(beta))
    of_teacher = (teacher.exp() * (teacher - mixture)).sum(-1)
    of_student = (student.exp() * (student - mixture)).sum(-1)
    return beta * of_teacher + (1 - beta) * of_student


class DistillationInHead(LossInHead):
    """The divergence from a teacher of the tokens that are trained on, from the student's head.

    The logits of both are held for few tokens at a time. Outside of the forward pass, the head of a
    sharded student would give a right loss and a wrong gradient.
    """

    def __init__(self, model: Any, args: Any, device: torch.device, teacher: FrozenModel) -> None:
        """Replace the forward pass of the student's output head."""
        super().__init__(model, args.max_logits_mib, device)
        name = f"--model_name_or_path {args.model_name_or_path}"
        refuse_later_changes(self._model_changes_logits, name)
        self._args = args
        self._teacher = teacher
        self._of_teacher = torch.empty(0)
        # A head may be padded to more entries than there are tokens
        self._size = min(model.get_input_embeddings().num_embeddings, teacher.num_entries)

    def losses(self, model: torch.nn.Module, batch: Mapping[str, Any]) -> tuple[torch.Tensor, Any]:
        """Return the loss of each token in nats and fp32, [tokens], and all of the output."""
        self._of_teacher = self._teacher.hidden_states(batch)
        return super().losses(model, batch)

    def _forward_of_head(
        self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor
    ) -> torch.Tensor:
        if self._request is None:
            return forward(hidden)
        positions, targets = self._request
        inputs = (hidden.flatten(0, 1)[positions], self._of_teacher, targets)
        pieces = zip(*[one.split(self._piece) for one in inputs], strict=True)
        loss = partial(self._losses_of_piece, forward)
        return torch.cat([checkpoint(loss, *piece, use_reentrant=False) for piece in pieces])

    def _losses_of_piece(
        self,
        forward: Callable[[torch.Tensor], torch.Tensor],
        hidden: torch.Tensor,
        of_teacher: torch.Tensor,
        targets: torch.Tensor,
    ) -> torch.Tensor:
        """Return the losses of some tokens, [tokens]."""
        args = self._args
        logits = forward(hidden)[:, : self._size].float()
        with torch.no_grad():
            wanted = self._teacher.logits(of_teacher)[:, : self._size]
            wanted = (wanted / args.temperature).log_softmax(-1)
        student = (logits / args.temperature).log_softmax(-1)
        soft = divergence(student, wanted, args.loss_type, args.beta)
        if not args.hard_loss_share:
            return soft
        # The gradient of the soft loss falls with the square of the temperature (arXiv 1503.02531)
        soft = soft * args.temperature**2
        hard = cross_entropy(logits, targets, reduction="none")
        return torch.lerp(soft, hard, args.hard_loss_share)
