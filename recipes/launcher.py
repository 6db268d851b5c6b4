"""Find the call of `accelerate launch` that started this process, and check its config file.

accelerate silently ignores a misspelt key in a section and trains under another strategy. The
launcher does not tell its processes which file it read. Its command line is therefore looked up
among the processes above this one and read with accelerate's own parser. What the command line
gives overrides the file, as in accelerate. Under torchrun or plain python there is no such file,
and nothing to check.
"""

import os
import re
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser

import accelerate_keys as keys
from config_files import find_faults, place_of, read, read_deepspeed
from config_rules import IGNORED, full_name, read_value

# The launcher's programs, as a path or as the name of a module
LAUNCH_PROGRAM = re.compile(r"\baccelerate[./]commands[./]launch(\.py)?$")
CLI_PROGRAM = re.compile(r"\baccelerate[./]commands[./]accelerate_cli(\.py)?$")

ENGINES = {  # flags of the launcher that choose an engine whatever the file says
    "cpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "tpu": "XLA",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}


@dataclass
class Launch:
    """How accelerate's launcher was called.

    given: {name: value} of the options on its command line. folder: where it was started.
    config_file: the file that it read, as a path from here, or None."""

    given: dict
    folder: str
    config_file: Path | None = None


def find_launch():
    """Return the Launch of this process, or None if accelerate's launcher did not start it."""
    for process in psutil.Process().parents():
        try:
            words = arguments_in(process.cmdline())
            folder = process.cwd()
        except psutil.Error:  # of another user, or ended
            continue
        if words is not None:
            return read_command(words, folder)
    return None


def arguments_in(command):
    """Return the launcher's own arguments in the command line of a process, None if it is another.

    Known are accelerate launch, accelerate-launch and python -m accelerate.commands.launch."""
    for i, word in enumerate(command):
        name = os.path.basename(word)
        following = command[i + 1 :]
        if name == "accelerate-launch" or LAUNCH_PROGRAM.search(word):
            return following
        is_cli = name == "accelerate" or CLI_PROGRAM.search(word)
        if is_cli and following[:1] == ["launch"]:
            return following[1:]
    return None


def read_command(words, folder):
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


def refuse(message):
    """In the place of a parser's error, which would end this process."""
    raise ValueError(f"the launcher's command line cannot be read: {message}")


def overridden(content, given):
    """Return a config as the launcher's command line changes it.

    This follows `_validate_launch_command` of accelerate/commands/launch.py. A setting of a section
    counts only if the engine reads that section. With a DeepSpeed JSON the command line changes
    nothing in deepspeed_config except the name of the JSON, and a mixed precision that it gives is
    not refused beside the JSON, unlike one in the file.
    """
    content = with_engine_of(given, content)
    own_section = keys.SECTION_OF.get(content.get("distributed_type"))
    beside_json = False
    if own_section == "deepspeed_config":
        if given.get("deepspeed_config_file"):
            named = {"deepspeed_config_file": given["deepspeed_config_file"]}
            content["deepspeed_config"] = (content.get("deepspeed_config") or {}) | named
        zero = content.get("deepspeed_config")
        beside_json = isinstance(zero, dict) and "deepspeed_config_file" in zero
    if beside_json and "mixed_precision" in given:
        content.pop("mixed_precision", None)
    for name, value in given.items():
        section = section_of(name)
        if beside_json and (section == "deepspeed_config" or name == "mixed_precision"):
            continue
        if section is None:
            if name in keys.TOP_LEVEL:
                content[name] = value
        elif section == own_section or isinstance(content.get(section), dict):
            content[section] = written_over(content.get(section) or {}, section, name, value)
    return content


def with_engine_of(given, content):
    """Return a copy of a config under the engine that a flag of the command line chooses.

    The sections of the other engines are left out.
    """
    content = deepcopy(content)
    for flag, engine in ENGINES.items():
        if not given.get(flag):
            continue
        content["distributed_type"] = engine
        for section in keys.SECTION_OF.values():
            if section != keys.SECTION_OF.get(engine):
                content.pop(section, None)
        if flag == "cpu":  # one process, without a word
            content.pop("num_processes", None)
    return content


def section_of(name):
    """Return the section of a config that an option of the launcher is written in, or None."""
    for section, known in keys.SECTIONS.items():
        if name in known:
            return section
    return None


def written_over(section, name, key, value):
    """Return the section of that name with a key set to a value of the command line, a text."""
    kind = keys.SECTIONS[name][key]
    if kind in (keys.BOOL, keys.INT):
        try:
            value = read_value(key, value, kind)
        except ValueError:  # the rules will say so
            pass
    others = {written: old for written, old in section.items() if full_name(name, written) != key}
    return others | {key: value}


def find_launch_faults():
    """Return (errors, warnings) of the file that the launcher read; both are empty without one.

    Each is one line with file, line number, key, reason and fix."""
    try:
        launch = find_launch()
        if launch is None or launch.config_file is None:
            return [], []
        return faults_of(launch)
    except ValueError as error:
        return [], [f"the launcher's config is not checked: {error}"]


def faults_of(launch):
    """The (errors, warnings) of a Launch. Raises ValueError if its file cannot be read (again)."""
    file = read(launch.config_file, launch.config_file.suffix == ".json")
    file = replace(file, content=overridden(file.content, launch.given))
    file.deepspeed = read_deepspeed(file, launch.folder)
    findings, _ = find_faults(file, recipes=True, folder=launch.folder)
    errors = []
    warnings = []
    for item in findings:
        key = ".".join(map(str, item.path))
        line = f"{place_of(item, file)}: {key}: {item.reason}; fix: {item.fix}"
        if item.severity == "error" and not is_newer(item):
            errors.append(line)
        elif item.severity == "warning":
            warnings.append(line)
    return errors, warnings


def is_newer(item):
    """Whether a finding is about a key that only the installed accelerate knows, a newer one."""
    if item.kind != IGNORED or item.in_json or len(item.path) != 2:
        return False
    section = item.path[0]
    key = full_name(*item.path)
    known = {action.dest for action in launch_command_parser()._actions}
    ours = set(keys.TOP_LEVEL)
    for names in keys.SECTIONS.values():
        ours.update(names)
    return section in keys.SECTIONS and key not in ours and key in known
