# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line, read into a dataclass by transformers' HfArgumentParser.

    @dataclass(kw_only=True)
    class Arguments(ModelArguments, TrainingArguments):
        packing: bool = arg(False, "fill each line of a batch with several rows")

    args = parse(Arguments, __doc__)

Each field is a flag: its type says how the value is read, `arg` gives the rest. A recipe that only
changes the default of a shared flag writes `learning_rate: float = 1e-6`; a class says in a method
`conflicts` which of its flags contradict each other.
"""

import argparse
import copy
import dataclasses
import difflib
import functools
import json
import math
import sys
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from core import __version__, extras
from core.exits import Exit, fail

A = TypeVar("A")
CONFIG = "--config"
# {name of a flag that other programs have: what is meant by it here}
ELSEWHERE = {
    "lr": "--learning_rate",
    "torch_dtype": "--dtype",
    "bf16": "accelerate launch --mixed_precision bf16",
    "fp16": "accelerate launch --mixed_precision fp16",
    "deepspeed": "accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml",
    "fsdp": "accelerate launch --config_file accelerate_configs/fsdp.yaml",
}


@dataclass(frozen=True)
class Bounds:
    """The bounds of a number: more than `above`, `least` or more, less than `below`."""

    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf

    def hold(self, value: float) -> bool:
        """Return whether a value is within the bounds. What is not finite never is."""
        return self.above < value < self.below and value >= self.least

    def __str__(self) -> str:
        words = {"above": self.above, "at least": self.least, "below": self.below}
        return " and ".join(f"{word} {end}" for word, end in words.items() if math.isfinite(end))


POSITIVE = Bounds(above=0)
NOT_NEGATIVE = Bounds(least=0)
SHARE = Bounds(least=0, below=1)


def arg(default: Any, help: str = "", bounds: Bounds | None = None, **options: Any) -> Any:
    """Return a dataclass field that is a flag. A subclass inherits what it leaves out.

    Args:
        default: its value, unless the command line or a file gives another.
        help: what it does, for `--help`.
        bounds: of a number.
        options: `names` are further names of the flag, which users of other libraries know; others
            are argparse's, in place of what follows from the type, such as `nargs`.
    """
    if help:
        options["help"] = help
    if bounds is not None:
        options["bounds"] = bounds
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=options)
    return dataclasses.field(default=default, metadata=options)


def free(default: Any, help: str = "", bounds: Bounds | None = None, **options: Any) -> Any:
    """Return what `arg` does, of a flag that a continued run may set otherwise.

    It does not change what is trained.
    """
    return arg(default, help, bounds, may_change=True, **options)


def settings_of(kind: type) -> dict[str, dict[str, Any]]:
    """Return {name of an argument: what `arg` says of it, in its group and in subclasses}."""
    settings: dict[str, dict[str, Any]] = {}
    for owner in reversed(kind.__mro__):
        for name, field in getattr(owner, "__dataclass_fields__", {}).items():
            settings.setdefault(name, {}).update(field.metadata)
    return settings


def may_change(kind: type) -> set[str]:
    """Return the names of the arguments that may differ in a resumed run."""
    return {name for name, setting in settings_of(kind).items() if setting.get("may_change")}


# ---- The parser ----
class Help(argparse.RawDescriptionHelpFormatter):
    """Help that keeps the lines of a docstring, and names each flag once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flag = action.option_strings[0]
        if action.nargs in (0, "?"):  # on or off
            return flag
        value = action.dest.rpartition("_")[2].upper()
        return f"{flag} {self._format_args(action, value)}"


class Parser(HfArgumentParser):
    """HfArgumentParser with a group of help for each class, whose errors are one line and 64."""

    def __init__(self, kind: type, description: str | None = None) -> None:
        super().__init__(
            kind,
            description=description,
            usage="%(prog)s [--flag value ...]",
            allow_abbrev=False,
            formatter_class=Help,
        )
        self.add_argument(
            CONFIG,
            metavar="FILE",
            default=argparse.SUPPRESS,  # no argument of the recipe: `with_files_read` takes it
            help="read arguments from this YAML or JSON file, or from a run.json, to repeat its "
            "run; flags on the command line override the file",
        )
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def _add_dataclass_arguments(self, dtype: Any) -> None:
        """Add a flag for each field, in the group of the class that declares it first."""
        hints = typing.get_type_hints(dtype)
        settings = settings_of(dtype)
        if "columns" in settings:
            roles = ", ".join([*dtype.COLUMN_ROLES, *dtype.COLUMN_ARGUMENTS])
            settings["columns"]["help"] += f": {roles}"
        fields = {field.name: field for field in dataclasses.fields(dtype)}
        # The groups come before the recipe, which has other defaults for some of their flags
        for owner in sorted(dtype.__mro__, key=lambda owner: len(owner.__mro__)):
            title = (owner.__doc__ or "").partition("\n")[0]
            group = self.add_argument_group(title.rstrip("."))
            for name in vars(owner).get("__annotations__", {}):
                if name in fields:
                    field = copy.copy(fields.pop(name))
                    field.type = hints[name]
                    self._add_flag(group, field, settings[name])

    def _add_flag(self, group: Any, field: Any, setting: Mapping[str, Any]) -> None:
        """Add the flag of a field, with its default in the help unless it is off or empty."""
        shown = setting["help"]
        default = field.default
        if default is dataclasses.MISSING:
            default = field.default_factory()
        if isinstance(default, list):
            default = " ".join(map(str, default))
        if default not in (None, "") and default is not False:
            shown += f" (default: {default})"
        names = setting.get("names", ())
        aliases = [f"--{name}" for name in names]
        aliases += [f"--{name.replace('_', '-')}" for name in names]
        field.metadata = {"help": shown.replace("%", "%%"), "aliases": aliases}
        self._parse_dataclass_field(group, field)
        flags = self._option_string_actions
        action = flags[f"--{field.name}"]
        for name in ("type", "nargs", "const"):
            setattr(action, name, setting.get(name, getattr(action, name)))
        if f"--no_{field.name}" in flags:
            flags[f"--no_{field.name}"].help = f"turn off --{field.name}"

    def error(self, message: str) -> NoReturn:
        """End with 64 and one line."""
        fail(Exit.USAGE, message)

    def refuse(self, words: Sequence[str], where: str = "") -> NoReturn:
        """End with 64 and a line about words that are no flags, with those nearest to them."""
        from accelerate.commands.launch import launch_command_parser

        message = f"{where}unrecognized arguments: {' '.join(words)}"
        flags = [word.partition("=")[0].replace("-", "_") for word in words if word[:2] == "--"]
        launcher = launch_command_parser()._option_string_actions
        near: list[str] = []
        for name in (flag.lstrip("_") for flag in flags):
            if name in ELSEWHERE:
                near.append(ELSEWHERE[name])
            elif f"--{name}" in launcher:
                near.append(f"accelerate launch --{name}")
            else:
                own = self._option_string_actions
                near += difflib.get_close_matches(f"--{name}", own, 1, 0.7)
        if near:
            message += f"; did you mean {', '.join(near)}?"
        self.error(message)


def read_json_object(text: str) -> dict[str, Any]:
    """Return the object of a JSON text; an ArgumentTypeError refuses anything else."""
    value = read_leaf(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text} is not a JSON object")
    return value


def read_leaf(text: Any) -> Any:
    """Return the value of a JSON text, or what is no JSON text as it is."""
    try:
        return json.loads(text)
    except (TypeError, ValueError):
        return text


# ---- Reading ----
def parse(kind: type[A], description: str | None = None, words: Sequence[str] | None = None) -> A:
    """Return `kind` filled from the command line, or from `words`.

    `--config FILE` first reads arguments from a YAML or JSON file, also from a run.json. Later
    files override earlier ones, and flags files. A wrong call ends with one line and code 64.
    """
    kind = with_extras(kind)
    parser = Parser(kind, description)
    words = with_files_read(parser, sys.argv[1:] if words is None else words)
    parsed: Any = parser.parse_args_into_dataclasses(
        words, look_for_args_file=False, return_remaining_strings=True
    )
    args, unknown = parsed
    if unknown:
        parser.refuse(unknown)
    problems = list(find_conflicts(args))
    if problems:
        fail(Exit.USAGE, *problems)
    return args


@functools.cache  # Two calls of one recipe have arguments of one class
def with_extras(kind: type[A]) -> type[A]:
    """Return `kind` with the arguments of the extras that it lists in EXTRAS."""
    listed: Sequence[str] = getattr(kind, "EXTRAS", ())
    missing = list(extras.find_missing(listed))
    if missing:
        fail(Exit.USAGE, *missing)
    groups: list[Any] = extras.hooks(listed, "Arguments")
    if not groups:
        return kind
    mixed: Any = type(kind.__name__, (kind, *groups), {"__module__": kind.__module__})
    return dataclass(kw_only=True)(mixed)


def find_conflicts(args: Any) -> Iterator[str]:
    """Yield a line for each number that is out of its bounds, and for each contradiction."""
    for name, setting in settings_of(type(args)).items():
        value = getattr(args, name)
        bounds = setting.get("bounds")
        if bounds is not None and value is not None and not bounds.hold(value):
            yield f"--{name} {value}: must be {bounds}"
    for owner in type(args).__mro__:  # each class knows its own flags
        if "conflicts" in vars(owner):
            yield from vars(owner)["conflicts"](args)


def with_files_read(parser: Parser, words: Sequence[str]) -> list[str]:
    """Return a command line with the arguments of each `--config FILE` before the other words."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument(CONFIG, action="append", default=[])
    finder.error = parser.error
    found, others = finder.parse_known_args(words)
    from_files = [word for path in found.config for word in words_of_file(parser, path)]
    return [*from_files, *others]


def words_of_file(parser: Parser, path: str) -> list[str]:
    """Return the arguments in a file, or in a run.json, as words of the command line."""
    try:
        with open(path, encoding="utf-8") as file:
            if path.endswith(".json"):
                content = json.load(file)
            else:  # as text, like the command line: YAML itself takes `no` for false
                content = yaml.load(file, yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        parser.error(f"{CONFIG} {path}: {' '.join(str(error).split())}")
    words: list[str] = []
    for key, value in content.get("arguments", content).items():
        action = parser._option_string_actions.get(f"--{key}")
        if action is None or action.default is argparse.SUPPRESS:
            parser.refuse([f"--{key}"], f"{CONFIG} {path}: ")
        if value in (None, "", "~", "null") or (value == [] and action.nargs != "*"):
            continue  # the default
        if isinstance(value, list):
            words += [f"--{key}", *map(str, value)]
            continue
        if isinstance(value, dict):
            value = json.dumps({name: read_leaf(leaf) for name, leaf in value.items()})
        words.append(f"--{key}={value}")  # one word, since a value may begin with a dash
    return words
