# SPDX-License-Identifier: Apache-2.0
"""Check the config file that accelerate's launcher read, before accelerate is used.

accelerate silently ignores a misspelled key in a section and trains under another strategy. The
file is therefore checked as the launcher's command line, which overrides it, changes it. Under
torchrun or plain python there is no such file, and nothing to check.
"""

from copy import deepcopy
from dataclasses import replace
from typing import Any

from accelerate.commands.launch import launch_command_parser

from components import accelerate_keys as keys
from components.accelerate_keys import full_name, read_value
from components.config_files import find_faults, place_of, read, read_deepspeed
from components.config_findings import IGNORED, Finding
from components.config_reading import written_in
from components.launch_command import Launch, find_launch

# Flags of the launcher that choose an engine whatever the file says
ENGINES = {
    "cpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "tpu": "XLA",
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
}


def find_launch_faults() -> tuple[list[str], list[str]]:
    """Return (errors, warnings) about the file that the launcher read; both are empty without one.

    Each is one line with file, line number, key, reason and fix.
    """
    try:
        launch = find_launch()
        if launch is not None:
            return faults_of(launch)
    except ValueError as error:
        return [], [f"the launcher's config is not checked: {error}"]
    return [], []


def faults_of(launch: Launch) -> tuple[list[str], list[str]]:
    """Return the (errors, warnings) about a Launch. Raises ValueError if its file is unreadable."""
    path = launch.config_file
    if path is None:
        return [], []
    file = read(path, as_json=path.suffix == ".json")
    file = replace(file, content=overridden(file.content, launch.given))
    file.deepspeed = read_deepspeed(file, launch.folder)
    findings, _ = find_faults(file, for_recipes=True, folder=launch.folder)
    errors = []
    warnings = []
    for item in findings:
        place = place_of(item, file)
        line = f"{place}: {item.dotted_path}: {item.reason}; fix: {item.fix}"
        if item.severity == "error" and not is_newer(item):
            errors.append(line)
        elif item.severity == "warning":
            warnings.append(line)
    return errors, warnings


def is_newer(item: Finding) -> bool:
    """Return whether a key is unknown to accelerate 1.15 but known to the installed version."""
    if item.kind != IGNORED or item.in_json or len(item.path) != 2:
        return False
    key = full_name(*item.path)
    is_known_here = key in keys.TOP_LEVEL or section_of(key) is not None
    if item.path[0] not in keys.SECTIONS or is_known_here:
        return False
    installed = {action.dest for action in launch_command_parser()._actions}
    return key in installed


# ---- What the command line overrides ----
def overridden(content: dict, given: dict[str, Any]) -> dict:
    """Return a config as the launcher's command line changes it.

    This follows `_validate_launch_command` of accelerate/commands/launch.py. A setting of a section
    only counts if the engine reads that section. With a DeepSpeed JSON the command line changes
    nothing in deepspeed_config except the name of the JSON, and a mixed precision that it gives is
    not refused beside the JSON, unlike one in the file.
    """
    content = with_engine_of(given, content)
    own_section = section_of_engine(content)
    if own_section == "deepspeed_config":
        point_to_json(content, given.get("deepspeed_config_file"))
        if "deepspeed_config_file" in written_in(content, own_section):
            if "mixed_precision" in given:
                content.pop("mixed_precision", None)
            given = {name: value for name, value in given.items() if counts_beside_json(name)}
    for name, value in given.items():
        section = section_of(name)
        if section is None:
            if name in keys.TOP_LEVEL:
                content[name] = value
        elif section == own_section or isinstance(content.get(section), dict):
            content[section] = with_option(content.get(section) or {}, section, name, value)
    return content


def section_of_engine(content: dict) -> str | None:
    """Return the section that the engine of a config reads; None if it reads none."""
    engine = content.get("distributed_type")
    if not isinstance(engine, str):
        return None
    return keys.SECTION_OF_ENGINE.get(engine)


def point_to_json(content: dict, name: str | None) -> None:
    """Set the DeepSpeed JSON of a config to the one that the command line names, if any."""
    section = content.get("deepspeed_config") or {}
    if name and isinstance(section, dict):
        content["deepspeed_config"] = section | {"deepspeed_config_file": name}


def counts_beside_json(name: str) -> bool:
    """Return whether the launcher reads an option although there is a DeepSpeed JSON."""
    return name != "mixed_precision" and section_of(name) != "deepspeed_config"


def with_engine_of(given: dict[str, Any], content: dict) -> dict:
    """Return a copy of a config under the engine that a flag of the command line chooses.

    The sections of the other engines are left out.
    """
    content = deepcopy(content)
    for flag, engine in ENGINES.items():
        if not given.get(flag):
            continue
        content["distributed_type"] = engine
        for section in keys.SECTION_OF_ENGINE.values():
            if section != keys.SECTION_OF_ENGINE.get(engine):
                content.pop(section, None)
        if flag == "cpu":  # accelerate then starts one process, without saying so.
            content.pop("num_processes", None)
    return content


def section_of(name: str) -> str | None:
    """Return the section of a config that an option of the launcher is written in, or None."""
    for section, known in keys.SECTIONS.items():
        if name in known:
            return section
    return None


def with_option(section: Any, name: str, key: str, value: Any) -> Any:
    """Return a section with a key set to a value, which the command line gives as text.

    Args:
        name: of the section.
    """
    if not isinstance(section, dict):  # The rules report it.
        return section
    kind = keys.SECTIONS[name][key]
    if kind in (keys.BOOL, keys.INT):
        try:
            value = read_value(key, value, kind)
        except ValueError:  # The rules report it.
            pass
    others = {written: old for written, old in section.items() if full_name(name, written) != key}
    return others | {key: value}
