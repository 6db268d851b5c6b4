# SPDX-License-Identifier: Apache-2.0
"""Rules on keys that are misspelled, misplaced or unknown, and on values that cannot be read."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from typing import Any

from components import accelerate_keys as keys
from components import deepspeed_keys
from components.accelerate_keys import Kind, choices_of, full_name, is_readable, read_value
from components.config_findings import (
    ADVICE,
    COSTS,
    IGNORED,
    STOPS,
    Finding,
    delete,
    finding,
    move,
    rename,
    set_value,
)
from components.config_names import (
    NAMES_OF_MESH,
    OUTSIDE_OF_MESH,
    common_prefix,
    is_comment,
    meant_in,
    normalized,
)
from components.config_reading import (
    Config,
    KnownSetting,
    OptionInSection,
    home_of,
    kind_of,
    known_settings,
    value_at,
    written_in,
)
from components.yaml_text import KeyPath, as_yaml

# (section, names in it): what an unknown key may mean
Names = tuple[tuple[KeyPath, tuple[str, ...]], ...]
SECTION_NAMES: Names = (((), tuple(keys.SECTIONS)),)
YAML_NAMES: Names = (
    ((), (*keys.TOP_LEVEL, *keys.SECTIONS)),
    *(((section,), tuple(known)) for section, known in keys.SECTIONS.items()),
)
MESH = ("parallelism_config",)
# The right name is looked for, which takes time, for this many unknown keys of a file at most
MAX_SEARCHES = 100

OWNED = "the recipes take it from their command line: {}"
SET_BY_SCRIPTS = "a script sets it, the recipes here by {}"
# Words that people write instead of a value
OTHER_WORDS = {
    "ddp": "MULTI_GPU",
    "tp": "MULTI_GPU",
    "tpu": "XLA",
    "zero": "DEEPSPEED",
    "fp32": "no",
    "float32": "no",
    "bfloat16": "bf16",
    "float16": "fp16",
    "gpu": "none",
    "cuda": "none",
}
# accelerate compares these with numbers, or passes them to functions that do
COMPARED_WITH_NUMBERS = (
    ("num_machines",),
    ("main_process_port",),
    ("num_processes",),
    ("parallelism_config", "parallelism_config_cp_size"),
    ("parallelism_config", "parallelism_config_sp_size"),
)


# ---- Names ----
def rules_of_names(config: Config) -> Iterator[Finding]:
    """Keys are known, at their place, written once, and have their prefix."""
    paths = list(paths_of(config.written))
    unknown = [path for path in paths if not is_known(path)]
    searched = set(unknown[:MAX_SEARCHES])
    for path in paths:
        if not is_known(path):
            if len(path) == 1 or not is_comment(path[-1]):
                yield judge_unknown(unknown_in_yaml(config, path, path in searched))
        elif len(path) == 1:
            yield from sections_hold_keys(config, path[0])
        else:
            yield from names_are_complete(config, *path)
    for option in config.options_in_sections:
        yield from option_is_at_home(config, option)


def paths_of(content: dict) -> Iterator[KeyPath]:
    """Yield the paths of all keys: the top level, then those of the sections."""
    for key in content:
        yield (key,)
    for section in keys.SECTIONS:
        if isinstance(content.get(section), dict):
            for key in content[section]:
                yield section, key


def is_known(path: KeyPath) -> bool:
    """Return whether accelerate reads a key at this path."""
    if len(path) == 1:
        return path[0] in keys.TOP_LEVEL or path[0] in keys.SECTIONS
    section, key = path
    if section in keys.OPEN_SECTIONS and home_of(key) is not None:
        return True
    return full_name(section, key) in keys.SECTIONS[section]


def sections_hold_keys(config: Config, key: str) -> Iterator[Finding]:
    """A section has keys, or is empty; accelerate says nothing to another value it has no use for.

    rules_of_engine report the section of another engine.
    """
    value = config.written[key]
    owner = {section: engine for engine, section in keys.SECTION_OF_ENGINE.items()}.get(key)
    if key not in keys.SECTIONS or isinstance(value, dict | None):
        return
    fix = "indent its keys below it"
    if key == "deepspeed_config" and str(value).endswith(".json"):
        fix = f"deepspeed_config_file: {value}, indented below it"
    if owner == "DEEPSPEED" and config.engine in (owner, None):
        yield finding(STOPS, (key,), "must be a mapping", fix)
    elif owner in (config.engine, None):
        yield finding(IGNORED, (key,), "must be a mapping: nothing of it is read", fix)


def names_are_complete(config: Config, section: str, key: Any) -> Iterator[Finding]:
    """Keys have their prefix, which the launcher adds, but a plugin made in a script does not."""
    name = full_name(section, key)
    if name == key:
        return
    path = (section, key)
    if name in config.written[section]:
        reason = f"{name} is written too: the last one counts"
        yield finding(IGNORED, path, reason, "keep one of them")
    else:
        reason = "works, since the launcher completes this name"
        yield finding(ADVICE, path, reason, [rename(path, name)])


# ---- Options of the launcher in sections ----
def option_is_at_home(config: Config, option: OptionInSection) -> Iterator[Finding]:
    """An option of the launcher works in any of the open sections, but beats its own key there."""
    if option.home == ():
        yield from engine_is_the_distributed_type(option)
    elif len(option.home) == 1:
        yield from top_level_is_in_force(config, option)
    else:
        yield option_of_another_section(config, option)


def engine_is_the_distributed_type(option: OptionInSection) -> Iterator[Finding]:
    """distributed_type names the engine, and no flag of the launcher contradicts it."""
    if option.path[-1] in keys.FLAGS_OF_ENGINES and option.value:
        reason = "works as the flag of the launcher, and may contradict distributed_type"
        yield finding(COSTS, option.path, reason, "delete it, and set distributed_type")


def top_level_is_in_force(config: Config, option: OptionInSection) -> Iterator[Finding]:
    """What is written at the top level is what the launcher does.

    Some options only work in a section, since the launcher never takes them from the top level.
    """
    (key,) = option.home
    if key in keys.COMMAND_LINE_ONLY or (key == "mixed_precision" and config.has_json):
        return
    if config.written.get(key, option.value) != option.value:
        place = ".".join(option.path)
        reason = f"not in force: {place}, which is {as_yaml(option.value)}, beats it"
        yield finding(IGNORED, option.home, reason, move_to_the_top(config, option))
        return
    reason = "works, since the launcher copies all keys of this section; its place is the top level"
    yield finding(COSTS, option.path, reason, move_to_the_top(config, option))


def move_to_the_top(config: Config, option: OptionInSection) -> Any:
    """Return the edits that move an option to the top level, or words if they would change more.

    The last key of parallelism_config turns the mesh on, and the launcher counts gpu_ids at the top
    level before it reads the sections.
    """
    (key,) = option.home
    section = option.path[0]
    is_only_key = section == "parallelism_config" and len(config.written[section]) == 1
    if option.value is None or key == "gpu_ids" or is_only_key:
        return f"{key} at the top level only"
    return [move(option.path, option.home, option.value)]


def option_of_another_section(config: Config, option: OptionInSection) -> Finding:
    """Return the finding on a key of another section, which works where the engine reads it."""
    section, key = option.home
    where = f"its place is {section}"
    if not config.is_read(option.home):
        reason = f"{where}; {config.engine} does not read it"
        return finding(IGNORED, option.path, reason, [delete(option.path)])
    if written_in(config.written, section).get(key, option.value) != option.value:
        reason = f"{where}, where it has another value"
        return finding(IGNORED, option.path, reason, "keep one of them")
    reason = f"works, since the launcher copies all keys of this section; {where}"
    return finding(COSTS, option.path, reason, f"{key} in {section}")


# ---- Unknown keys ----
@dataclass(frozen=True)
class UnknownKey:
    """A key that nothing reads where it is.

    Attributes:
        path: the key and the sections above it.
        value: the value that is written for it.
        kind: STOPS or IGNORED: what accelerate or DeepSpeed does with it.
        reason: the same in words.
        names: the names that it may mean; () if the right name is not looked for.
        content: the whole file.
        obstacle: why a value cannot be written at a known path instead, or "" if it can.
        engine: the distributed_type of the file; None in a DeepSpeed JSON.
    """

    path: KeyPath
    value: Any
    kind: str
    reason: str
    names: Names
    content: dict
    obstacle: Callable[[KeyPath, Any], str]
    engine: str | None = None

    @property
    def section(self) -> KeyPath:
        """The path without the key."""
        return self.path[:-1]

    @property
    def key(self) -> Any:
        """The key without its section."""
        return self.path[-1]

    def found(self, more: str, fix: Any) -> Finding:
        """Return the finding on this key, with `more` added to its reason."""
        return finding(self.kind, self.path, self.reason + more, fix)


def unknown_in_yaml(config: Config, path: KeyPath, search: bool) -> UnknownKey:
    """Return a key that accelerate does not know, with its effect and what it may mean."""
    value = value_at(config.written, path)
    kind = IGNORED
    reason = "no such key: accelerate ignores it silently"
    names = YAML_NAMES
    if len(path) == 1:
        kind = STOPS
        reason = "accelerate refuses unknown keys here"
    if len(path) == 1 and isinstance(value, dict):
        names = SECTION_NAMES
    if not search:
        names = ()
    obstacle = partial(obstacle_in_yaml, config)
    return UnknownKey(path, value, kind, reason, names, config.written, obstacle, config.engine)


def obstacle_in_yaml(config: Config, path: KeyPath, value: Any) -> str:
    """Return why a value cannot be written at a known path instead, or "" if it can."""
    if path[-1] in keys.SECTIONS:
        can_be_read = isinstance(value, dict | None)
    elif isinstance(value, dict) and kind_of(path) != keys.ANYTHING:
        can_be_read = False
    else:
        can_be_read = value is None or is_readable(path[-1], value, kind_of(path))
    if not can_be_read:
        return f"does not take {as_yaml(value)}"
    if is_below_one(path, value):
        return f"is 1 or more, not {as_yaml(value)}"
    version = keys.READ_BY_ONE_VERSION.get(path[-1], config.fsdp_version)
    return "" if version == config.fsdp_version else f"is not read by FSDP{config.fsdp_version}"


def is_below_one(path: KeyPath, value: Any) -> bool:
    """Return whether the size of a mesh is -1, as torchtitan names all processes that are left."""
    return path[-1] in NAMES_OF_MESH.values() and value is not None and int(str(value)) < 1


def judge_unknown(unknown: UnknownKey) -> Finding:
    """Return the finding on an unknown key, with the name that was most likely meant."""
    if unknown.key in keys.OWNED_BY_THE_RECIPE:
        return owned_by_the_recipe(unknown)
    if unknown.path in keys.REMOVED:
        return removed_from_accelerate(unknown)
    if unknown.engine is not None and name_in_mesh(unknown) in OUTSIDE_OF_MESH:
        return outside_of_mesh(unknown)
    if unknown.section == ("deepspeed_config",) and isinstance(unknown.value, dict):
        return section_of_a_json(unknown)
    meant = nearest(unknown.section, str(unknown.key), unknown.names)
    if meant is None or (meant[-1] in keys.SECTIONS and not isinstance(unknown.value, dict)):
        return similar_to_none(unknown)
    if meant[:-1] != unknown.section:
        return misplaced(unknown, meant)
    if meant[-1] in written_in(unknown.content, *unknown.section):
        return written_beside(unknown, meant)
    obstacle = unknown.obstacle(meant, unknown.value)
    if obstacle:
        return of_another_kind(unknown, meant, obstacle)
    return unknown.found("", [rename(unknown.path, meant[-1])])


def name_in_mesh(unknown: UnknownKey) -> str:
    """Return the name that a key has as the size of a mesh; Megatron-LM's section has its own."""
    if unknown.section not in ((), MESH):
        return ""
    return normalized(str(unknown.key)).removeprefix("parallelism_config_")


def outside_of_mesh(unknown: UnknownKey) -> Finding:
    """Return the finding on a size that accelerate's mesh does not have, but a recipe."""
    flag = OUTSIDE_OF_MESH[name_in_mesh(unknown)]
    more = f"; accelerate's mesh does not have it, the recipes take it as {flag}"
    return unknown.found(more, [delete(unknown.path)])


def owned_by_the_recipe(unknown: UnknownKey) -> Finding:
    """Return the finding on a setting that scripts own.

    Some of these are known keys of deepspeed_config: under DeepSpeed, the fix moves them there.
    """
    key = unknown.key
    place = ("deepspeed_config", key)
    if unknown.engine != "DEEPSPEED" or key not in keys.DEEPSPEED or place == unknown.path:
        owner = SET_BY_SCRIPTS.format(keys.OWNED_BY_THE_RECIPE[key])
        if unknown.section == ("deepspeed_config",):
            owner = f"only a DeepSpeed JSON has it, or {owner}"
        return unknown.found(f"; {owner}", [delete(unknown.path)])
    if key in written_in(unknown.content, "deepspeed_config"):
        return unknown.found(f"; {'.'.join(place)} is written too", [delete(unknown.path)])
    edits = [move(unknown.path, place, unknown.value)]
    return unknown.found("; its place is deepspeed_config", edits)


def removed_from_accelerate(unknown: UnknownKey) -> Finding:
    """Return the finding on a key that only older versions of accelerate read."""
    more = "; older versions knew this one"
    replacement = keys.REMOVED[unknown.path]
    if replacement is None:
        return unknown.found(more, [delete(unknown.path)])
    return unknown.found(more, f"{replacement}, or delete it")


def similar_to_none(unknown: UnknownKey) -> Finding:
    """Return the finding on a key that means no known one.

    The fix does not delete a whole section with all its keys: a person has to choose.
    """
    more = ""
    if unknown.section == () and unknown.key in keys.ONLY_OPTIONS:
        more = f"; the launcher has a flag of this name, --{unknown.key}"
    if unknown.section == ("deepspeed_config",):
        more = words_of_json_key(unknown.key)
    if unknown.names and not isinstance(unknown.value, dict):
        return unknown.found(more, [delete(unknown.path)])
    if unknown.section == () and value_at(unknown.value, ("distributed_type",)) is not None:
        return unknown.found("; it does not look into sections", "its keys at the top level")
    return unknown.found(more, "delete it, or write its right name")


def section_of_a_json(unknown: UnknownKey) -> Finding:
    """Return the finding on a section of a DeepSpeed JSON that is written in the YAML instead."""
    more = words_of_json_key(unknown.key)
    settings = {}
    if unknown.key == "zero_optimization":
        settings = settings_of_yaml(unknown.value, (unknown.key,))
        more += "; here its keys are zero_stage, offload_optimizer_device, offload_param_device"
    written = written_in(unknown.content, "deepspeed_config")
    settings = settings or {}
    paths = {name: ("deepspeed_config", name) for name in settings}
    obstacles = [unknown.obstacle(path, settings[name]) for name, path in paths.items()]
    if not paths or any(obstacles) or set(paths) & set(written):
        fix = "a JSON with it in deepspeed_config_file"
        return unknown.found(more, fix)
    edits = [set_value(path, settings[name]) for name, path in paths.items()]
    return unknown.found(more, [*edits, delete(unknown.path)])


def settings_of_yaml(section: dict, path: KeyPath) -> dict[str, Any] | None:
    """Return {key of the YAML: value} of a section of a JSON; None if a key has no equal there."""
    names = {name_in_json: name for name, name_in_json in deepspeed_keys.IN_JSON.items()}
    settings = {}
    for key, value in section.items():
        inner = (*path, key)
        dotted = ".".join(map(str, inner))
        if isinstance(value, dict):
            found = settings_of_yaml(value, inner)
            if found is None:
                return None
            settings |= found
        elif dotted in names:
            settings[names[dotted]] = value
        else:
            return None
    return settings


def words_of_json_key(key: Any) -> str:
    """Return where a DeepSpeed JSON has a key that is written in a YAML; "" if nowhere."""
    for section, known in deepspeed_keys.KEYS.items():
        if key in known:
            return f"; only a DeepSpeed JSON has it, as {'.'.join((*section, key))}"
    return ""


def misplaced(unknown: UnknownKey, meant: KeyPath) -> Finding:
    """Return the finding on a key that belongs to another section."""
    section = meant[:-1]
    more = f"; its place is {'.'.join(section) or 'the top level'}"
    has_engine = unknown.engine is not None
    if section and has_engine and is_of_another_engine(section[0], unknown.engine):
        more += f", which {unknown.engine} does not read"
        return unknown.found(more, [delete(unknown.path)])
    if meant[-1] in written_in(unknown.content, *section):
        return written_beside(unknown, meant, more)
    obstacle = unknown.obstacle(meant, unknown.value)
    if obstacle:
        return unknown.found(f"{more}, where it {obstacle}", f"delete it, or write {meant[-1]}")
    if section == MESH and unknown.kind == IGNORED and not written_in(unknown.content, *MESH):
        # A mesh of one size would stop a file that runs without one
        return unknown.found(more, f"{meant[-1]} there, beside the other sizes of a mesh")
    return unknown.found(more, [move(unknown.path, meant, unknown.value)])


def of_another_kind(unknown: UnknownKey, meant: KeyPath, obstacle: str) -> Finding:
    """Return the finding on a key whose value the right key does not take.

    The key had no effect where accelerate ignores it, so that deleting it changes nothing.
    """
    more = f"; {meant[-1]} {obstacle}"
    if isinstance(unknown.value, dict | list):
        return unknown.found(f"; the key is {meant[-1]}", f"delete it, or write {meant[-1]}")
    if meant[-1] in NAMES_OF_MESH.values():
        return unknown.found(more, f"{meant[-1]}: num_processes divided by the other sizes")
    return unknown.found(more, [delete(unknown.path)])


def is_of_another_engine(section: str, engine: str | None) -> bool:
    """Return whether a section is only read by an engine other than this one."""
    return any(
        section == own_section and engine != reader
        for reader, own_section in keys.SECTION_OF_ENGINE.items()
    )


def written_beside(unknown: UnknownKey, meant: KeyPath, more: str = "") -> Finding:
    """Return the finding on a key whose right name is also in the file."""
    name = meant[-1]
    more += f"; {name} is written too"
    if written_in(unknown.content, *meant[:-1])[name] == unknown.value:
        return unknown.found(more, [delete(unknown.path)])
    if name != unknown.key:
        return unknown.found(more, f"delete it, or {name}")
    return unknown.found(more, "delete one of the two")


def nearest(section: KeyPath, key: str, names: Names) -> KeyPath | None:
    """Return the path that an unknown key means, or None.

    In its own section a key may be misspelled or have a former name; from another one it has the
    whole name.
    """
    for home, known in names:
        if home == section:
            meant = meant_in(section, key, known, common_prefix(known))
            if meant is not None:
                return (*home, meant)
    wanted = normalized(key)
    for home, known in names:
        if wanted in known:
            return (*home, wanted)
        if home == MESH and wanted in NAMES_OF_MESH:
            return (*home, NAMES_OF_MESH[wanted])
    return None


# ---- Values ----
def rules_of_values(config: Config) -> Iterator[Finding]:
    """accelerate can read all values that the engine needs, and numbers are not text."""
    beaten = {option.home for option in config.options_in_sections}
    for setting in known_settings(config.written):
        if setting.path not in beaten and config.is_read(setting.path):
            yield from value_is_readable(config, setting, setting.path)
    for option in config.options_in_sections:
        if option.home and config.is_read(option.home):
            setting = KnownSetting(option.path, option.value, kind_of(option.home))
            yield from value_is_readable(config, setting, option.home)
    yield from true_is_the_word(config)
    yield from debug_is_no_text(config)


def value_is_readable(config: Config, setting: KnownSetting, home: KeyPath) -> Iterator[Finding]:
    """accelerate can read a value, which is at its home or in another section."""
    if setting.value is None and may_be_empty(home):
        return
    if home == ("deepspeed_config", "gradient_accumulation_steps"):
        return  # rules_of_deepspeed know more about it
    key = home[-1]
    try:
        value = read_value(key, setting.value, setting.kind)
    except ValueError:
        if key in keys.READ_AS_ANYTHING:
            return
        if home == ("num_processes",) and is_counted_by_torchrun(config, setting.value):
            reason = "torchrun starts one process for each GPU or core that it finds"
            yield finding(COSTS, setting.path, reason, "a number")
            return
        kind = setting.kind
        if key == "fsdp_reshard_after_forward" and config.fsdp_version == 2:
            kind = keys.BOOL
        yield unreadable(setting.path, setting.value, kind, "num_processes" in config.written)
        return
    if isinstance(setting.value, str) and home in COMPARED_WITH_NUMBERS:
        yield number_in_quotes(config, setting.path, home, value)


def is_counted_by_torchrun(config: Config, value: Any) -> bool:
    """Return whether torchrun itself counts processes, which accelerate cannot divide."""
    is_word = value in keys.COUNTS_OF_TORCHRUN
    return is_word and config.uses_torchrun and config.machines == 1


def number_in_quotes(config: Config, path: KeyPath, home: KeyPath, value: int) -> Finding:
    """Return the finding on a number that is text.

    torchrun takes a number of processes as text, if it has not to be divided among machines.
    """
    kind = STOPS
    if home == ("num_processes",) and config.uses_torchrun and config.machines == 1:
        kind = COSTS
    if home == ("main_process_port",) and not config.uses_torchrun:
        kind = COSTS
    return finding(kind, path, "text, although accelerate needs a number", [set_value(path, value)])


def true_is_the_word(config: Config) -> Iterator[Finding]:
    """accelerate takes zero3_save_16bit_model for true only if the word is true."""
    path = ("deepspeed_config", "zero3_save_16bit_model")
    word = str(config.zero_written.get(path[-1], "true")).lower()
    if config.is_read(path) and word not in ("true", "false", "none"):
        reason = f"{word}: accelerate takes all but true for false"
        yield finding(IGNORED, path, reason, "true or false")


def debug_is_no_text(config: Config) -> Iterator[Finding]:
    """Text in debug counts as true, whatever it says."""
    value = config.written.get("debug")
    if isinstance(value, str) and keys.TRUTHS.get(value.lower()) is False:
        reason = "text that is not empty counts as true: debug mode is on"
        yield finding(IGNORED, "debug", reason, [set_value("debug", False)])


def may_be_empty(path: KeyPath) -> bool:
    """Return whether a key may have no value."""
    if len(path) == 1:
        return path[0] not in keys.MUST_NOT_BE_EMPTY
    return path[0] == "deepspeed_config" or path[1] in keys.MAY_BE_EMPTY


def unreadable(path: KeyPath, value: Any, kind: Kind, has_processes: bool = True) -> Finding:
    """Return the finding on a value of a wrong kind, with the value that was most likely meant.

    accelerate accepts an unquoted no as distributed_type only if there is a number of processes.
    """
    if kind == keys.TEXT:
        return not_text(path, value)
    choices = {str(choice).lower(): choice for choice in choices_of(kind)}
    if value is False and "no" in choices:
        works = path == ("distributed_type",) and has_processes
        reason = "a bare no is false in YAML"
        return finding(COSTS if works else STOPS, path, reason, [set_value(path, choices["no"])])
    wanted = kind
    if choices:
        wanted = f"one of {', '.join(map(str, choices.values()))}"
    written = "empty" if value is None else as_yaml(value)
    if is_placeholder(value):
        fix = f"{wanted}, or the flag --{path[-1]}"
        reason = f"{written}: must be {wanted}, and accelerate fills in no variables"
        return finding(STOPS, path, reason, fix)
    meant = meant_by(value, choices)
    fix = wanted if meant is None else [set_value(path, meant)]
    return finding(STOPS, path, f"{written}: must be {wanted}", fix)


def is_placeholder(value: Any) -> bool:
    """Return whether a value is to be filled in, as $NAME, ${NAME}, {{ name }} or ???."""
    return isinstance(value, str) and re.match(r"\$|\{\{|\?\?\?", value) is not None


def not_text(path: KeyPath, value: Any) -> Finding:
    """Return the finding on a value that must be text; the fix joins a list with commas."""
    text = str(value)
    if isinstance(value, list):
        text = ",".join(map(str, value))
    return finding(STOPS, path, f"{as_yaml(value)} is not text", [set_value(path, text)])


def meant_by(value: Any, choices: dict[str, Any]) -> Any:
    """Return the choice that a wrong value most likely means, or None.

    Args:
        choices: {lower-case word: choice}.
    """
    word = str(value).lower()
    if word in OTHER_WORDS:
        return choices.get(OTHER_WORDS[word].lower())
    close = get_close_matches(word, choices, 1)
    return choices[close[0]] if close else None
