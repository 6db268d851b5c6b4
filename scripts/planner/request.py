# SPDX-License-Identifier: Apache-2.0
"""A call of scripts/plan_memory.py: which recipe trains what, its micro-batch, and the card."""

import contextlib
import dataclasses
import importlib
import io
import re
import sys
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from common import Exit, find_missing, first_line
from core import loss
from core.cli import Parser, parse, with_extras, with_files_read
from core.exits import End

# Recipes whose step is known here: causal language models, and pairs of their answers
RECIPES = ("llama", "mixtral", "mistral_pretrain", "llama_dpo")
GB = 10**9
GIB = 2**30
# GiB that torch reports as a card's total capacity in the out-of-memory messages of public issues,
# which is less than what is printed on the box
CARDS = {
    "t4": 14.6,
    "v100": 15.7,
    "v100-32gb": 31.7,
    "3090": 23.6,
    "4090": 23.5,
    "5090": 31.3,
    "l4": 22.0,
    "a10g": 22.0,
    "a6000": 47.4,
    "l40s": 44.4,
    "a100-40gb": 39.4,
    "a100": 79.1,
    "h100": 79.1,
    "h200": 139.8,
    "b200": 178.3,
    "mi300x": 191.6,
}
USUAL_CARD = 80 * GIB  # if none is named, the loss is computed in pieces as on this one
# Memory that no tensor holds. Each number is an assumption, at the upper end of public reports.
CONTEXT = 0.8 * GIB  # CUDA's context and the kernels that are loaded into it
COMMUNICATOR = 0.5 * GIB  # NCCL's buffers, once there are several ranks
ROUNDING = 0.05  # share of all tensors that the allocator rounds up or cannot reuse


class UnplannableError(Exception):
    """A request that cannot be planned, with the exit code of the command."""

    def __init__(self, message: str, code: int = Exit.USAGE) -> None:
        super().__init__(message)
        self.code = code


@contextlib.contextmanager
def refusing_as_the_recipe() -> Generator[None]:
    """Turn what a recipe refuses, and what a model's class raises, into an UnplannableError."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except End as end:
        raise UnplannableError(end.why, end.code) from None
    except UnplannableError:
        raise
    except Exception as error:  # A model's own kernels may fail in any way on fake tensors
        kind = type(error).__name__
        raise UnplannableError(
            f"cannot be traced, so rehearse it: {kind}: {first_line(error)}"
        ) from None


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank, at its worst: all lines are as long as the longest.

    Attributes:
        lines: of one row each, unless they are packed; a pair has two.
        length: tokens of a line.
        supervised: tokens, of all lines together, that the loss counts.
        is_packed: whether several rows, which must not see each other, share a line.
    """

    lines: int
    length: int
    supervised: int
    is_packed: bool = False

    def part(self, parts: int) -> "Batch":
        """Return what the fullest of several ranks has that share each line."""
        length = -(-self.length // parts)
        return dataclasses.replace(
            self, length=length, supervised=min(self.supervised, self.lines * length)
        )


@dataclass(frozen=True)
class Request:
    """What the user asks; plan_memory.py explains each field."""

    model: str = ""  # recipes/llama.py, or in its place a hub id, a folder or a config.json
    words: list[str] = field(default_factory=list)  # the recipe's own arguments
    config_file: str | None = None  # none: choose among the shipped ones
    sizes: dict[str, int] = field(default_factory=dict)  # those that replace the mesh of the config
    num_processes: int | None = None
    num_machines: int | None = None
    mixed_precision: str | None = None
    gpu: str | None = None  # a name or a size, as `bytes_of_card` reads it
    longest: int | None = None  # tokens of the longest row
    json: str | None = None

    @property
    def given(self) -> set[str]:
        """The names of the recipe's arguments that the user gave."""
        flags = [word.partition("=")[0] for word in self.words if word.startswith("--")]
        return {flag.removeprefix("--").replace("-", "_") for flag in flags}

    def check(self) -> None:
        """Raise UnplannableError for options that are out of range or do not fit together."""
        for key, size in self.sizes.items():
            if size < 1:
                raise UnplannableError(f"--parallelism_config_{key} {size}: must be at least 1")
        if self.longest is not None and self.longest < 1:
            raise UnplannableError(f"--longest {self.longest}: must be at least 1")
        if self.sizes and not self.config_file:
            raise UnplannableError("--parallelism_config_...: changes the mesh of a --config_file")
        if not self.config_file and not self.gpu:
            raise UnplannableError(
                "give --config_file to plan one strategy, or --gpu to choose among all strategies"
            )


# ---- What is trained ----
def read_arguments(request: Request) -> tuple[ModuleType, Any, Request]:
    """Return the recipe, its arguments, and the request with all words that they come from.

    The words of a `--config` take its place. The recipe derives --max_logits_mib from the GPU that
    it finds; here that is the card that is planned for.

    Raises:
        UnplannableError, SystemExit: if the recipe or its arguments cannot be planned.
    """
    words = request.words
    if request.model.endswith(".py"):
        name = Path(request.model).stem
        if name not in RECIPES:
            raise UnplannableError(
                f"{request.model}: the step of this recipe is not traced, only those of "
                f"{', '.join(RECIPES)}: rehearse it, its shard report has the bytes of each rank"
            )
    else:
        words = [*words, "--model_name_or_path", request.model]
        name = recipe_for(request)
    recipe = importlib.import_module(name)
    words = with_files_read(Parser(with_extras(recipe.Arguments)), words)
    request = dataclasses.replace(request, words=words)
    args = parse(recipe.Arguments, words=words)
    read_config(args.model_name_or_path, args.model_revision)
    if args.max_logits_mib is None:
        card = bytes_of_card(request.gpu) or USUAL_CARD
        args = dataclasses.replace(args, max_logits_mib=logits_mib_on(card))
    return recipe, args, request


def logits_mib_on(card: float) -> float:
    """Return how many MiB of fp32 logits a recipe computes at a time, by default, on a card."""
    return loss.LOGITS_SHARE * card / 2**20


def recipe_for(request: Request) -> str:
    """Return the recipe that trains a model: of mixtures, the one with a loss of their routers."""
    revision = "main"
    if "--model_revision" in request.words[:-1]:
        revision = request.words[request.words.index("--model_revision") + 1]
    config = read_config(request.model, revision)
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    has_loss = kind and hasattr(sys.modules[kind.__module__], "load_balancing_loss_func")
    has_factor = hasattr(config.get_text_config(), "router_aux_loss_coef")
    return "mixtral" if has_loss and has_factor else "llama"


def read_config(name: str, revision: str) -> Any:
    """Return the transformers config of a hub id, a folder or a config.json.

    Raises:
        UnplannableError: with 69 if the hub cannot be reached, with 64 for what is no config.
    """
    is_path = find_missing(name) is not None or name.endswith(".json")
    if is_path and not Path(name).is_file():
        raise UnplannableError(f"{name}: no such file or folder; MODEL may be a hub id too")
    try:
        return AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=False)
    except Exception as error:  # Each config class checks its own fields in its own way.
        code = Exit.USAGE if Path(name).exists() else Exit.NO_HUB
        raise UnplannableError(
            f"{name}: no config that transformers can read: {first_line(error)}", code
        ) from None


def batch_of(args: Any, request: Request) -> Batch:
    """Return the largest micro-batch of a recipe's arguments.

    Raises:
        UnplannableError: for packed lines that are not full.
    """
    is_filled = getattr(args, "packing", False) or type(args).__module__ == "mistral_pretrain"
    length = args.max_length
    if request.longest is not None and request.longest < length:
        if is_filled:
            raise UnplannableError("--longest: packed sequences are filled to --max_length")
        length = request.longest
    lines = args.per_device_train_batch_size * (2 if hasattr(args, "beta") else 1)
    is_packed = is_filled or getattr(args, "padding_free", False)
    return Batch(lines, length, lines * length, is_packed)


# ---- Cards ----
def bytes_of_card(card: str | None) -> int | None:
    """Return the bytes of a card: a name of CARDS, or a size such as 24GB (10^9) or 24GiB (2^30).

    Returns None for no card.

    Raises:
        UnplannableError: for anything else.
    """
    if card is None:
        return None
    name = card.lower().replace("rtx", "").strip(" -_")
    if name in CARDS:
        return int(CARDS[name] * GIB)
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(gb|gib|g)?", name)
    if size is None or float(size[1]) == 0:
        raise UnplannableError(
            f"--gpu {card}: neither a size such as 24GB nor one of {', '.join(CARDS)}"
        )
    unit = GIB if size[2] == "gib" else GB
    return int(float(size[1]) * unit)


def with_constants(device: Mapping[str, float], ranks: int) -> dict[str, int]:
    """Return what a device holds, {category: bytes}, with "constants" for all but tensors."""
    constants = CONTEXT + ROUNDING * sum(device.values())
    if ranks > 1:
        constants += COMMUNICATOR
    held = {**device, "constants": constants}
    return {category: round(size) for category, size in held.items()}
