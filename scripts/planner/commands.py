# SPDX-License-Identifier: Apache-2.0
"""The command that launches a way to run."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from . import recipe
from .candidates import Launch, Way
from .request import SIZES

WIDTH = 110  # characters of a line of a folded command, before its backslash
PLACEHOLDER = "YOUR_ROWS.jsonl"  # if the command line names no data set
# The arguments that `command` places itself
PLACED = {"model_name_or_path", "dataset_name", "learning_rate"}


def command(launch: Launch, way: Way) -> list[str]:
    """Return the words of the command that launches a way.

    These are the user's arguments and what the way adds, with a learning rate that fits what is
    trained, and a placeholder for the data, if the user gave none.
    """
    request = launch.request
    args = way.plan.args
    words = ["accelerate", "launch", "--config_file", way.path]
    words += ["--num_processes", str(way.plan.ranks)]
    words += sizes_of_mesh(way)
    if launch.machines > 1:
        words += ["--num_machines", str(request.num_machines)]
    if request.mixed_precision:
        words += ["--mixed_precision", request.mixed_precision]
    words.append(f"recipes/{request.recipe}")
    words += ["--model_name_or_path", model_to_load(args.model_name_or_path)]
    words += ["--dataset_name", *data_sets(launch)]
    words += ["--learning_rate", str(learning_rate(launch, way))]
    return words + recipe_flags(launch, way)


def sizes_of_mesh(way: Way) -> list[str]:
    """Return the launcher's options for the mesh of a way under which ranks share rows."""
    mesh = way.plan.mesh
    if mesh.copies == 1:
        return []
    sizes = {key: getattr(mesh, key.removesuffix("_size")) for key in SIZES}
    words = []
    for key, size in sizes.items():
        if size > 1 or (key == "dp_shard_size" and way.plan.engine != "single"):
            words += [f"--parallelism_config_{key}", str(size)]
    return words


def chosen(launch: Launch, name: str) -> bool:
    """Return whether the user gave an argument of the recipe, also in a file of arguments."""
    return name in launch.given or getattr(launch.args, name) != launch.defaults[name]


def data_sets(launch: Launch) -> list[str]:
    """Return the user's data sets, or a placeholder for them."""
    if chosen(launch, "dataset_name"):
        return launch.args.dataset_name
    return [PLACEHOLDER]


def learning_rate(launch: Launch, way: Way) -> float:
    """Return the user's learning rate, or else one that fits what the way trains."""
    args = way.plan.args
    if args.use_peft and not chosen(launch, "learning_rate"):
        return recipe.adapter_rate(args)
    return args.learning_rate


def model_to_load(name: str) -> str:
    """Return what the recipe can load: the folder of a config.json."""
    path = Path(name)
    if path.name == "config.json" and path.is_file():
        return str(path.parent)
    return name


def recipe_flags(launch: Launch, way: Way) -> list[str]:
    """Return the recipe's arguments that differ from its defaults, as words."""
    left_out = set(PLACED)
    if "max_logits_mib" not in launch.given:
        left_out.add("max_logits_mib")  # The recipe chooses the same value on this card.
    words = []
    for name, value in vars(way.plan.args).items():
        if name in left_out or value is None or value == launch.defaults[name]:
            continue
        words.append(f"--{name}")
        if isinstance(value, list):
            words += [str(item) for item in value]
        elif value is not True:
            words.append(str(value))
    return words


def folded(words: Sequence[str]) -> str:
    """Return a command as text, folded between its flags with a backslash.

    A flag whose value is wider than a line keeps it whole.
    """
    parts: list[str] = []
    for word in map(shlex.quote, words):
        if word.startswith("--") or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    lines: list[str] = []
    for part in parts:
        if lines and len(f"{lines[-1]} {part}") <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(f"    {part}" if lines else part)
    return " \\\n".join(lines)
