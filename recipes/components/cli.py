# SPDX-License-Identifier: Apache-2.0
"""A recipe's command line, read into a dataclass by transformers' HfArgumentParser.

    @dataclass(kw_only=True)
    class Arguments(CommonArguments):
        packing: bool = arg(False, "fill each line of a batch with several rows")

    args = parse_arguments(Arguments, __doc__)

Each field is a flag: its type says how the value is read, `arg` gives default and help, and
markers in Annotated give bounds. A recipe that only changes the default of a shared flag writes
`learning_rate: float = 1e-6`; help and bounds are inherited.
"""

import argparse
import copy
import dataclasses
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar

import yaml
from transformers.hf_argparser import HfArgumentParser

from components import __version__
from components.flag_hints import advice_on, flag_meant, hint_on
from core.exits import Exit, fail

A = TypeVar("A")
CONFIG_FLAG = "--config"


# ---- Markers of a field: Annotated[int, Above(0), MAY_CHANGE] ----
@dataclass(frozen=True)
class Above:
    """The value must be greater than the bound."""

    bound: float


@dataclass(frozen=True)
class AtLeast:
    """The value must be equal to the bound or greater."""

    bound: float


@dataclass(frozen=True)
class Below:
    """The value must be smaller than the bound."""

    bound: float


@dataclass(frozen=True)
class ReadBy:
    """The text on the command line is read by this function, which may raise a ValueError."""

    function: Callable[[str], Any]


@dataclass(frozen=True)
class AnyNumber:
    """The flag may be given without a value, which means an empty list."""


@dataclass(frozen=True)
class AlsoNamed:
    """The flag has a second name, by which another library's users know it."""

    name: str


@dataclass(frozen=True)
class MayChange:
    """A resumed run may have another value, since this does not change what is trained."""


MAY_CHANGE = MayChange()


def arg(default: Any, help: str) -> Any:
    """Return a dataclass field that is a flag, with its default and its help."""
    metadata = {"help": help}
    if isinstance(default, list):
        return dataclasses.field(default_factory=default.copy, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def markers_of(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the markers of each field, from the nearest class that annotates it with any."""
    markers: dict[str, tuple[Any, ...]] = {}
    for owner in kind.__mro__:
        for name, hint in vars(owner).get("__annotations__", {}).items():
            if typing.get_origin(hint) is typing.Annotated:
                markers.setdefault(name, hint.__metadata__)
    return markers


def second_names(kind: type) -> dict[str, str]:
    """Return {second name of an argument: its name}."""
    names = {}
    for name, markers in markers_of(kind).items():
        for marker in markers:
            if isinstance(marker, AlsoNamed):
                names[marker.name] = name
    return names


def may_change(kind: type) -> set[str]:
    """Return the names of the arguments that may differ in a resumed run."""
    return {name for name, markers in markers_of(kind).items() if MAY_CHANGE in markers}


# ---- Reading ----
def parse_arguments(kind: type[A], description: str = "", words: Sequence[str] | None = None) -> A:
    """Return `kind` filled from the command line, or from `words`.

    `--config FILE` first reads arguments from a YAML or JSON file, also from a run.json; those on
    the command line override them. A wrong call ends with one line and code 64. The bounds of
    numbers are checked later by components.checks, together with everything else that can be wrong.
    """
    words = list(sys.argv[1:] if words is None else words)
    parser = RecipeParser(kind, description=description)
    config, words = take_config(parser, words)
    parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(
        [*config, *words], look_for_args_file=False
    )
    return parsed[0]


class RecipeHelp(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Help that keeps the lines of a docstring, names each flag once, and shows its default.

    No default is shown for flags that are off or empty by default.
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=100)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or action.default is False or action.default == []:
            return action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default)})"
        return super()._get_help_string(action)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        if action.nargs in (0, "?"):  # on or off
            return action.option_strings[0]
        value = self._format_args(action, value_name(action.dest))
        return f"{action.option_strings[0]} {value}"


def value_name(name: str) -> str:
    """Return what the help calls the value of an argument: the noun in its name, in capitals.

    This is the last word, but in metric_for_best_model and modules_to_save it is the first.
    """
    noun = re.split("_(?:for|to)_", name)[0]
    return noun.rpartition("_")[2].upper()


class RecipeParser(HfArgumentParser):
    """HfArgumentParser with groups by topic, which ends a wrong call with one line and code 64."""

    def __init__(self, kind: type, description: str = "") -> None:
        self.kind = kind
        super().__init__(
            kind,
            description=description,
            usage="%(prog)s [--flag value ...]",
            allow_abbrev=False,
            formatter_class=RecipeHelp,
        )

    def _add_dataclass_arguments(self, dtype: type) -> None:
        """Add a flag for each field, in the group of the class that declares it."""
        hints = typing.get_type_hints(dtype)
        markers = markers_of(dtype)
        second = {name: other for other, name in second_names(dtype).items()}
        fields = {field.name: field for field in dataclasses.fields(dtype)}
        groups = {}
        for owner in reversed(dtype.__mro__):
            title = vars(owner).get("GROUP")
            if title is not None and title not in groups:
                groups[title] = self.add_argument_group(title)
            for name in vars(owner).get("__annotations__", {}):
                if name not in fields:
                    continue
                field = copy.copy(fields.pop(name))
                field.type = hints[name]
                shown_help = help_of(dtype, name).replace("%", "%%")
                aliases = []
                if name in second:
                    aliases = [f"--{second[name]}", f"--{second[name].replace('_', '-')}"]
                field.metadata = MappingProxyType({"help": shown_help, "aliases": aliases})
                # pyrefly: ignore[bad-argument-type]  # transformers itself passes groups too
                self._parse_dataclass_field(groups[owner.GROUP], field)
                flags = self._option_string_actions
                apply_markers(flags[f"--{name}"], markers.get(name, ()))
                if f"--no_{name}" in flags:  # accept argparse's usual spelling too
                    flags[f"--no_{name}"].help = f"turn off --{name}"
                    flags[f"--no-{name}"] = flags[f"--no_{name}"]
        self.add_argument(
            CONFIG_FLAG,
            metavar="FILE",
            default=argparse.SUPPRESS,  # not an argument of the recipe: take_config reads it
            help="read arguments from this YAML or JSON file, or from a run.json, to repeat its "
            "run; flags on the command line override the file",
        )
        self.add_argument("--version", action="version", version=f"%(prog)s {__version__}")

    def error(self, message: str) -> NoReturn:
        """End with 64 and one line."""
        fail(Exit.USAGE, message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuse unknown arguments, where HfArgumentParser raises a ValueError.

        One line names them all, and one more each says what is meant, as far as that is known.
        """
        namespace, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word for word in unknown if re.match("--?[A-Za-z]", word)]
            hints = [hint_on(flag, self.flag_names()) for flag in dict.fromkeys(flags)]
            problem = f"unrecognized arguments: {' '.join(unknown)}"
            fail(Exit.USAGE, problem, *filter(None, hints))
        return namespace, unknown

    def flag_names(self) -> list[str]:
        """Return the names of all flags, without dashes."""
        flags = [flag for flag in self._option_string_actions if flag.startswith("--")]
        return [flag.removeprefix("--") for flag in flags if "-" not in flag.removeprefix("--")]


def help_of(kind: type, name: str) -> str:
    """Return the help of a field, from the nearest class that gives it one."""
    for owner in kind.__mro__:
        field = getattr(owner, "__dataclass_fields__", {}).get(name)
        if field is not None and "help" in field.metadata:
            return field.metadata["help"]
    raise TypeError(f"{kind.__name__}.{name} has no help")


def apply_markers(action: Any, markers: Sequence[Any]) -> None:
    """Let the markers of a field change how its flag is read."""
    for marker in markers:
        if isinstance(marker, ReadBy):
            action.type = marker.function
        if isinstance(marker, AnyNumber):
            action.nargs = "*"


def find_out_of_bounds(arguments: Any) -> list[str]:
    """Return a line for each number that is out of bounds."""
    problems = []
    for name, markers in markers_of(type(arguments)).items():
        value = getattr(arguments, name)
        if value is None:
            continue
        for marker in markers:
            rule = broken_rule(value, marker)
            if rule is not None:
                problems.append(f"--{name} {value}: must be {rule}")
    return problems


def broken_rule(value: float, marker: Any) -> str | None:
    """Return the rule of a marker that a value breaks, in words, or None if it breaks none."""
    match marker:
        case Above(bound) if not bound < value < math.inf:
            return f"above {bound}"
        case AtLeast(bound) if not bound <= value < math.inf:
            return f"{bound} or more"
        case Below(bound) if not value < bound:
            return f"below {bound}"
    return None


# ---- Arguments from a file ----
def take_config(parser: RecipeParser, words: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that `--config FILE` stands for, and the words without it.

    Of several files, the later ones override the earlier ones.
    """
    from_files: list[str] = []
    others: list[str] = []
    remaining = iter(words)
    for word in remaining:
        flag, equals, path = word.partition("=")
        if flag != CONFIG_FLAG:
            others.append(word)
            continue
        if not equals:
            path = next(remaining, "")
        if not path or path.startswith("--"):
            fail(Exit.USAGE, f"argument {CONFIG_FLAG}: expected one argument")
        from_files += words_of_file(parser, path)
    return from_files, others


def read_leaf(value: Any) -> Any:
    """Return a value of a mapping as JSON has it: PlainLoader reads every number as text."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError:
        return value


def takes_mapping(kind: type, name: str) -> bool:
    """Return whether the value of an argument is a mapping, written as JSON on the command line."""
    hint = typing.get_type_hints(kind)[name]
    return any(typing.get_origin(part) is dict for part in (hint, *typing.get_args(hint)))


def words_of_file(parser: RecipeParser, path: str) -> list[str]:
    """Return the arguments in a YAML or JSON file as words of the command line."""
    known = {field.name for field in dataclasses.fields(parser.kind)}
    second = second_names(parser.kind)
    words = []
    for key, value in read_arguments(path).items():
        name = str(key).replace("-", "_")
        name = second.get(name, name)
        if name not in known:
            fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: {refuse_key(key, name, known)}")
        action = parser._option_string_actions[f"--{name}"]
        if isinstance(value, dict):
            if not takes_mapping(parser.kind, name):
                reason = f"{key} needs a value or a list, not a mapping"
                fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: {reason}")
            value = json.dumps({key: read_leaf(leaf) for key, leaf in value.items()})
        if value is None or (value == [] and action.nargs != "*"):
            continue
        if isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={value}")  # one word, since a value may begin with a dash
    return words


def refuse_key(key: object, name: str, known: set[str]) -> str:
    """Return why a key of a file is refused, and what is meant by it, as far as that is known.

    Args:
        name: the key with underscores.
        known: names of the recipe's arguments.
    """
    advice = advice_on(name, known)
    if advice is not None:
        return f"{key} is not an argument: {advice}"
    meant = flag_meant(name, known)
    if meant is not None:
        return f"{key} is not an argument; did you mean {meant}?"
    return f"{key} is not an argument"


class PlainLoader(yaml.SafeLoader):
    """Reads values as text, as the command line does: otherwise YAML takes `no` for false."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # Otherwise shared with its parent


PlainLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile(r"(~|null|)$"), ["~", "n", ""]
)


def read_arguments(path: str) -> Mapping[str, Any]:
    """Return the arguments in a file: its top level, or what a run.json has under "arguments"."""
    try:
        with open(path, encoding="utf-8") as file:
            if path.endswith(".json"):
                content = json.load(file)
            else:
                content = yaml.load(file, Loader=PlainLoader)
    except OSError as error:
        fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: {os.strerror(error.errno or 0)}")
    except (ValueError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())[:200]
        fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: cannot be read: {reason}")
    if isinstance(content, dict) and "distributed_type" in content:
        fix = f"pass --config_file {path} to accelerate launch, before the recipe"
        fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: is a file for the launcher: {fix}")
    if isinstance(content, dict) and isinstance(content.get("arguments"), dict):
        content = content["arguments"]
    if not isinstance(content, dict):
        fail(Exit.USAGE, f"{CONFIG_FLAG} {path}: has no arguments, such as `learning_rate: 2e-5`")
    return content
