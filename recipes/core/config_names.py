# SPDX-License-Identifier: Apache-2.0
"""A misspelt key in the YAML of `accelerate launch`, which accelerate ignores without a word.

The run then ends well under another strategy than the file says. The names are asked of the
installed accelerate.
"""

import contextlib
import difflib
import functools
import inspect
import os
import re
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml
from accelerate.commands.config.config_args import ClusterConfig, default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import launch as accelerate_launch

# The two names are those of older versions, which accelerate converts
TOP_LEVEL = (*ClusterConfig.__dataclass_fields__, "fp16", "dynamo_backend")
SECTIONS = [name for name in TOP_LEVEL if name.endswith("_config")]
# What `_validate_launch_command` of accelerate puts before the keys of a section
PREFIXES = {"fsdp_config": "fsdp", "fp8_config": "fp8", "dynamo_config": "dynamo_"}
# {key of a DeepSpeed config: the recipes' flag that it would silently replace}
OWNED_BY_FLAGS = {
    "gradient_accumulation_steps": "--gradient_accumulation_steps",
    "gradient_clipping": "--max_grad_norm",
    "train_batch_size": "--per_device_train_batch_size",
    "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
}
LAUNCHER = re.compile(r"(^|/)accelerate-launch$|\baccelerate[./]commands[./]launch(\.py)?$")
PROGRAM = re.compile(r"(^|/)accelerate$|\baccelerate[./]commands[./]accelerate_cli(\.py)?$")


# ---- The file that was launched ----
def find_launch() -> Namespace | None:
    """Return the arguments of the `accelerate launch` that started this process, or None.

    The launcher does not pass them on: its command line is looked up among the parents of this
    process. There is none under torchrun and plain python. `config_file` is the file that it read,
    as a path from here, or None; `nondefault` has the names of the options that were given.
    """
    for process in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # it belongs to another user, or has ended
            words = arguments_of_launcher(process.cmdline())
            if words is not None:
                return read_command(words, process.cwd())
    return None


def arguments_of_launcher(command: list[str]) -> list[str] | None:
    """Return the words after `accelerate launch` in the command line of a process, or None."""
    for place, word in enumerate(command):
        if LAUNCHER.search(word):
            return command[place + 1 :]
        if PROGRAM.search(word) and command[place + 1 : place + 2] == ["launch"]:
            return command[place + 2 :]
    return None


def read_command(words: list[str], folder: str) -> Namespace:
    """Return the arguments of a launcher that was started in a folder, as `find_launch` does."""
    args = launch_command_parser().parse_args(words)
    path = args.config_file
    if path is None and not args.cpu and os.path.isfile(default_config_file):
        path = default_config_file
    if path is not None and os.path.realpath(folder) != os.path.realpath(os.getcwd()):
        path = os.path.join(folder, path)
    args.config_file = path
    return args


# ---- Its keys ----
@dataclass(frozen=True)
class Fault:
    """What is wrong at a key of a file; `line` is None where the key is missing."""

    file: str
    line: int | None
    key: str
    reason: str
    fix: str
    severity: str = "error"

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.line else self.file
        return f"{place}: {self.key}: {self.reason}; fix: {self.fix}"


@dataclass(frozen=True)
class Key:
    """A key as it is written: the keys from the top of the file down to it, and its line."""

    path: tuple[str, ...]
    line: int

    @property
    def name(self) -> str:
        """Its name in `accelerate launch`: the key, with the prefix of its section."""
        return full_name("".join(self.path[:-1]), self.path[-1])


def full_name(section: str, key: str) -> str:
    """Return a key of a section with the prefix that accelerate puts before it."""
    prefix = PREFIXES.get(section, "")
    return key if key.startswith(prefix) else f"{prefix.rstrip('_')}_{key}"


def read_keys(text: str) -> list[Key]:
    """Return the keys of YAML or JSON, from top to bottom. Raises yaml.YAMLError."""

    def walk(node: yaml.Node | None, above: tuple[str, ...]) -> Iterator[Key]:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            path = (*above, str(key.value))
            yield Key(path, key.start_mark.line + 1)
            yield from walk(value, path)

    return list(walk(yaml.compose(text, yaml.SafeLoader), ()))


@functools.cache
def names_of_options() -> frozenset[str]:
    """Return what the keys of sections may be called: the launcher copies them to its options."""
    options = {action.dest for action in launch_command_parser()._actions}
    read = re.findall(r"\bargs\.(\w+)", inspect.getsource(accelerate_launch))
    return frozenset(options | set(read))


def find_unknown_keys(file: str) -> Iterator[Fault]:
    """Yield each key of a YAML that accelerate does not read; in a section it says nothing."""
    keys = read_keys(Path(file).read_text(encoding="utf-8"))
    written = Counter(key.path for key in keys)
    for key in keys:
        names = names_of_options()
        if len(key.path) == 1:
            names = TOP_LEVEL
        dotted = ".".join(key.path)
        if written[key.path] > 1:
            yield Fault(file, key.line, dotted, "written twice: the last one counts", "keep one")
        elif key.name not in names and len(key.path) <= 2:
            close = difflib.get_close_matches(key.name, names, 1, 0.8)
            fix = close[0] if close else "delete it"
            yield Fault(file, key.line, dotted, "accelerate has no such key here", fix)


def find_launch_faults() -> list[str]:
    """Return a line for each key that accelerate does not read in the file of this launch."""
    launch = find_launch()
    if launch is None or launch.config_file is None:
        return []
    return [str(fault) for fault in find_unknown_keys(launch.config_file)]
