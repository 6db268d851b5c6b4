"""What the planner asks of recipes/llama.py. No other module of the package imports the recipe.

The recipe parses its own arguments, refuses what it would refuse in a launch, and brings the loss
and the optimizer that are traced. Importing this module takes as long as importing the recipe.
"""

import copy
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import llama
import preflight
import torch
from transformers import PreTrainedTokenizerBase

# The recipe's arguments: an argparse.Namespace, copied with other values by `with_values`.
RecipeArguments = Namespace
MIB = 2**20
CPU = torch.device("cpu")
# Refusals that depend on this machine, and not on the one that is planned for.
ABOUT_THIS_MACHINE = ("--model_name_or_path", "DeepSpeed compiles")


# ---- Arguments ----
def parse_words(words: Sequence[str]) -> RecipeArguments:
    """Return the recipe's arguments from the words of its command line, read by its own parser.

    Raises SystemExit, after the recipe's own one-line message, if a word is wrong.
    """
    # The recipe records a wrong call in its output folder. Planning is no run of that folder.
    llama.fault_tolerance.RUN["output_dir"] = None
    with mock.patch.object(sys, "argv", ["llama.py", *words]):
        return llama.parse_args()


def with_values(args: RecipeArguments, **values: Any) -> RecipeArguments:
    """Return a copy of the arguments in which some have other values."""
    changed = copy.copy(args)
    vars(changed).update(values)
    return changed


def refusals(
    args: RecipeArguments,
    strategy: tuple[str, int, int],
    ranks: int,
    mixed_precision: str,
    use_orig_params: bool,
) -> list[str]:
    """Return what the recipe would refuse at its start, apart from what depends on the machine.

    Args:
        args: the recipe's arguments.
        strategy: its name, the version of FSDP or 0, and the stage of ZeRO or -1.
        ranks: number of processes.
        mixed_precision: no, bf16 or fp16.
        use_orig_params: FSDP1's setting of this name.
    """
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    state = SimpleNamespace(
        deepspeed_plugin=SimpleNamespace(deepspeed_config={"zero_optimization": zero}),
        fsdp_plugin=SimpleNamespace(use_orig_params=use_orig_params),
    )
    accelerator = SimpleNamespace(mixed_precision=mixed_precision, num_processes=ranks, state=state)
    return [
        problem
        for is_broken, problem in rules(args, accelerator, strategy)
        if is_broken and not problem.startswith(ABOUT_THIS_MACHINE)
    ]


def rules(
    args: RecipeArguments, accelerator: SimpleNamespace, strategy: tuple[str, int, int]
) -> Iterator[tuple[object, str]]:
    """Yield (whether it is broken, the problem) of the recipe's rules."""
    yield from preflight.rules_of_values(args)
    yield from preflight.rules_of_strategy(args, accelerator, strategy)


# ---- The loss ----
def logits_mib(args: RecipeArguments) -> float:
    """Return how many MiB of fp32 logits the recipe computes at a time where it finds no GPU."""
    return llama.logits_mib(args, CPU)


def logits_mib_on(card: float) -> float:
    """Return how many MiB of fp32 logits the recipe computes at a time on a card of so many bytes,
    unless --max_logits_mib says otherwise."""
    return llama.LOGITS_SHARE * card / MIB


def prepare_model(model: torch.nn.Module, args: RecipeArguments, autocasts: bool) -> None:
    """Do to a loaded model what the recipe does before it hands it to `Accelerator.prepare`.

    autocasts: whether matrix products compute in the lower precision of autocast.
    """
    if args.gradient_checkpointing:
        enable = getattr(
            model, "activation_checkpointing_enable", model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
    llama.loss_in_head(model, logits_mib(args))
    if args.use_peft:
        # FSDP2 casts by itself instead of autocast; when it is traced, autocast stands in for it.
        accelerator = SimpleNamespace(native_amp=autocasts, is_fsdp2=False)
        llama.leave_casts_to_autocast(model, args, accelerator)


def make_optimizer(model: torch.nn.Module, args: RecipeArguments) -> torch.optim.Optimizer:
    """Return the recipe's optimizer over what trains."""
    return llama.make_optimizer(model, args)


def summed_loss(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """Return the cross-entropy summed over the supervised tokens of a batch."""
    return llama.summed_loss(model, batch)


def forget_batch() -> None:
    """Let go of the tensors that the loss holds of the last batch."""
    llama.SUPERVISED.clear()


# ---- Rows ----
def labels_of(
    row: dict[str, Any], tokenizer: PreTrainedTokenizerBase, max_length: int
) -> list[int]:
    """Return the labels of a row, -100 for each token that is not trained on."""
    return llama.tokenize_row(row, tokenizer, max_length)["labels"]
