# SPDX-License-Identifier: Apache-2.0
"""Find the call of `accelerate launch` that started this process.

The launcher does not pass on to its processes how it was called. Its command line is therefore
looked up among the parents of this process and read with accelerate's own parser. Under torchrun or
plain python there is no such call.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

# The launcher's programs, as a path or as the name of a module
LAUNCH_PROGRAM = re.compile(r"\baccelerate[./]commands[./]launch(\.py)?$")
CLI_PROGRAM = re.compile(r"\baccelerate[./]commands[./]accelerate_cli(\.py)?$")
# The launcher exports them if it was asked for several processes or machines.
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launcher:
    """The process of accelerate's launcher that started this one.

    Attributes:
        process: the running process.
        arguments: the words on its command line after the program's name.
    """

    process: psutil.Process
    arguments: list[str]


@dataclass(frozen=True)
class Launch:
    """How accelerate's launcher was called.

    Attributes:
        given: {name: value} of the options on its command line.
        folder: the working directory in which it was started.
        config_file: the file that it read, as a path from this process's directory, or None.
    """

    given: dict[str, Any]
    folder: str
    config_file: Path | None = None


def find_launch() -> Launch | None:
    """Return the Launch of this process, or None if accelerate's launcher did not start it.

    Raises ValueError if the launcher's command line cannot be parsed.
    """
    launcher = find_launcher()
    if launcher is None:
        return None
    try:
        folder = launcher.process.cwd()
    except psutil.Error:  # It belongs to another user, or has ended.
        return None
    return read_command(launcher.arguments, folder)


def find_readable_launch() -> Launch | None:
    """Return the Launch of this process, or None if there is none or it cannot be parsed."""
    try:
        return find_launch()
    except ValueError:  # check_launch has warned about it.
        return None


def started_one_of_several_processes() -> bool:
    """Return whether accelerate's launcher was to start several processes but started only one.

    The only trace is an address in the environment that the launcher does not have in its own.
    """
    launcher = find_launcher()
    if launcher is None or "ACCELERATE_USE_CPU" not in os.environ:
        return False
    try:
        before = launcher.process.environ()
    except (psutil.Error, OSError):  # It has ended, or belongs to another user.
        return False
    return any(os.environ.get(name) != before.get(name) for name in ADDRESS)


def find_launcher() -> Launcher | None:
    """Return the nearest of this process's parents that is accelerate's launcher, or None."""
    for process in psutil.Process().parents():
        try:
            arguments = arguments_in(process.cmdline())
        except psutil.Error:  # It belongs to another user, or has ended.
            continue
        if arguments is not None:
            return Launcher(process, arguments)
    return None


def arguments_in(command: list[str]) -> list[str] | None:
    """Return the launcher's own arguments in the command line of a process, or None.

    The launcher is recognized as accelerate launch, accelerate-launch and
    python -m accelerate.commands.launch.
    """
    for i, word in enumerate(command):
        name = os.path.basename(word)
        following = command[i + 1 :]
        if name == "accelerate-launch" or LAUNCH_PROGRAM.search(word):
            return following
        is_cli = name == "accelerate" or CLI_PROGRAM.search(word)
        if is_cli and following[:1] == ["launch"]:
            return following[1:]
    return None


def read_command(words: list[str], folder: str) -> Launch:
    """Return the Launch of a launcher's arguments. Raises ValueError if they cannot be parsed."""
    parser = launch_command_parser()
    parser.error = refuse
    args = parser.parse_args(words)
    given = {name: getattr(args, name) for name in args.nondefault}
    path = args.config_file
    if path is None and not args.cpu and os.path.isfile(default_config_file):
        path = default_config_file
    if path is None:
        return Launch(given, folder)
    started_here = os.path.realpath(folder) == os.path.realpath(os.getcwd())
    if started_here:
        return Launch(given, folder, Path(path))
    return Launch(given, folder, Path(folder, path))


def refuse(message: str) -> NoReturn:
    """Raise a ValueError, in place of a parser's own `error`, which would end this process."""
    raise ValueError(f"the launcher's command line cannot be read: {message}")
