"""The command that launches a way to run."""

import shlex
from pathlib import Path

from .candidates import Launch, Way

WIDTH = 112  # characters of a folded command


def command(launch: Launch, way: Way) -> str:
    """Return the command that launches a way: the user's arguments and what the way adds."""
    request = launch.request
    words = ["accelerate", "launch", "--config_file", way.path]
    words += ["--num_processes", str(way.plan.ranks)]
    if launch.machines > 1:
        words += ["--num_machines", str(request.num_machines)]
    if request.mixed_precision:
        words += ["--mixed_precision", request.mixed_precision]
    words += ["recipes/llama.py", "--model_name_or_path"]
    words.append(model_to_load(way.plan.args.model_name_or_path))
    words += recipe_flags(launch, way)
    return shlex.join(words)


def model_to_load(name: str) -> str:
    """Return what the recipe can load: the folder of a config.json."""
    path = Path(name)
    if path.name == "config.json" and path.is_file():
        return str(path.parent)
    return name


def recipe_flags(launch: Launch, way: Way) -> list[str]:
    """Return the recipe's arguments that differ from its defaults, as words."""
    left_out = {"model_name_or_path"}
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


def folded(text: str) -> str:
    """Return a command folded between its flags to lines of at most WIDTH characters."""
    lines: list[str] = []
    for part in flags_with_values(text):
        if lines and len(lines[-1]) + 1 + len(part) <= WIDTH:
            lines[-1] += f" {part}"
        else:
            lines.append(part)
    return " \\\n    ".join(lines)


def flags_with_values(text: str) -> list[str]:
    """Return the parts of a command: the program, and each flag with its values."""
    parts: list[str] = []
    for word in map(shlex.quote, shlex.split(text)):
        if word.startswith("--") or not parts:
            parts.append(word)
        else:
            parts[-1] += f" {word}"
    return parts
