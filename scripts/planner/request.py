# SPDX-License-Identifier: Apache-2.0
"""A call of scripts/plan_memory.py, and the micro-batch that it asks about."""

import argparse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from .errors import UnplannableError

# Options of `accelerate launch`, each with a value, that change no byte.
LAUNCHER_OPTIONS = (
    "--machine_rank",
    "--main_process_ip",
    "--main_process_port",
    "--main_training_function",
    "--gpu_ids",
    "--rdzv_backend",
    "--deepspeed_hostfile",
    "--num_cpu_threads_per_process",
)
# Sizes of a mesh, which `accelerate launch` takes as --parallelism_config_KEY
SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")
LAUNCHER_FLAGS = ("--multi_gpu", "--quiet")
RECIPES = ("llama.py", "mixtral.py", "llama_pipeline.py")  # that can be planned


@dataclass(frozen=True)
class Request:
    """What the user asks: a model or a recipe with its arguments, a config or none, and a card."""

    model: str = ""  # recipes/llama.py, or in its place a hub id, a folder or a config.json
    words: list[str] = field(default_factory=list)  # the recipe's own arguments
    config_file: str | None = None  # none: choose among the shipped ones
    sizes: dict[str, int] = field(default_factory=dict)  # those that replace the mesh of the config
    num_processes: int | None = None
    num_machines: int | None = None
    mixed_precision: str | None = None
    gpu: str | None = None  # a name or a size, as `cards.bytes_of` reads it
    longest: int | None = None  # tokens of the longest row
    supervised_share: float = 1.0  # share of all tokens that are trained on
    recipe_of_model: str = RECIPES[0]  # what trains it if no recipe is named
    simulate: bool = False  # trace instead of the closed form
    plot: str | None = None
    json: str | None = None

    @property
    def machines(self) -> int:
        """Hosts, with as many GPUs each."""
        return self.num_machines or 1

    def check(self) -> None:
        """Raise UnplannableError for options that are out of range or do not fit together."""
        if not 0 < self.supervised_share <= 1:
            raise UnplannableError(
                f"--supervised_share {self.supervised_share}: must be above 0 and at most 1"
            )
        for key, size in self.sizes.items():
            if size < 1 and not (key == "dp_shard_size" and size == -1):  # accelerate's "the rest"
                raise UnplannableError(f"--parallelism_config_{key} {size}: must be at least 1")
        if self.longest is not None and self.longest < 1:
            raise UnplannableError(f"--longest {self.longest}: must be at least 1")
        if self.sizes and not self.config_file:
            raise UnplannableError(
                f"--parallelism_config_{next(iter(self.sizes))} changes the mesh of a YAML: add "
                "its --config_file"
            )
        if not self.config_file and not self.gpu:
            raise UnplannableError(
                "give --config_file to plan one strategy, or --gpu to choose among all strategies"
            )

    @property
    def given(self) -> set[str]:
        """The names of the recipe's arguments that the user gave."""
        return {
            word.removeprefix("--").partition("=")[0].replace("-", "_")
            for word in self.words
            if word.startswith("--")
        }

    @property
    def revision(self) -> str:
        """The revision of MODEL that its arguments name."""
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--model_revision", "--model-revision", default="main")
        found, _ = parser.parse_known_args(self.words)
        return found.model_revision

    @property
    def names_recipe(self) -> bool:
        """Whether a recipe is named, which has the model among its arguments."""
        return self.model.endswith(".py")

    @property
    def recipe(self) -> str:
        """The name of the recipe.

        Raises UnplannableError for a recipe that cannot be planned.
        """
        if not self.names_recipe:
            return self.recipe_of_model
        name = Path(self.model).name
        if name not in RECIPES:
            raise UnplannableError(
                f"{self.model}: only recipes/{', '.join(RECIPES)} can be planned, or any "
                "decoder: give the model instead"
            )
        return name

    def recipe_words(self) -> list[str]:
        """Return the words of the recipe's command line, the model among them.

        Raises UnplannableError for a recipe that cannot be planned, and for two models.
        """
        if self.names_recipe:
            return self.words
        if "--model_name_or_path" in self.words:
            raise UnplannableError(
                "--model_name_or_path: MODEL already names it; "
                f"leave it out, or give recipes/{self.recipe} instead of MODEL"
            )
        return [*self.words, "--model_name_or_path", self.model]


def without_launcher_options(words: list[str]) -> list[str]:
    """Return the words of a launch command without those that only the launcher reads."""
    kept = []
    skips_value = False
    for word in words:
        if skips_value:
            skips_value = False
        elif word in LAUNCHER_OPTIONS:
            skips_value = True
        elif word not in LAUNCHER_FLAGS:
            kept.append(word)
    return kept


@dataclass(frozen=True)
class Batch:
    """A micro-batch of one rank, at its worst: all sequences are as long as the longest."""

    sequences: int
    length: int  # tokens of a sequence
    supervised: int  # tokens, of all sequences together, that the loss counts
    packed: bool = False  # whether a sequence holds several rows, which must not see each other
    # Under expert parallelism the lines (Mixture) that arrive at this rank in each layer; none
    # stands for as many as it sends
    arrived: tuple[int, ...] = ()


class BatchArguments(Protocol):
    """The recipe's arguments that determine a micro-batch."""

    max_length: int
    per_device_train_batch_size: int

    @property
    def packing(self) -> bool:
        """Whether several rows share a sequence."""

    @property
    def padding_free(self) -> bool:
        """Whether the rows of a micro-batch are one sequence."""


def batch_of(args: BatchArguments, request: Request) -> Batch:
    """Return the largest micro-batch of the recipe's arguments.

    Raises UnplannableError for packed sequences that are not full.
    """
    length = args.max_length
    if request.longest is not None and request.longest < length:
        if args.packing:
            raise UnplannableError("--longest: packed sequences are filled to --max_length")
        length = request.longest
    sequences = args.per_device_train_batch_size
    supervised = max(round(sequences * length * request.supervised_share), 1)
    return Batch(sequences, length, supervised, args.packing or args.padding_free)
