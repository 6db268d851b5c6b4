# SPDX-License-Identifier: Apache-2.0
"""Rules on a DeepSpeed JSON to which a config of accelerate points."""

from collections.abc import Iterator

from components import accelerate_keys as keys
from components import deepspeed_keys
from components.config_findings import (
    COSTS,
    IGNORED,
    RECIPE,
    STOPS,
    UNSAVED,
    Finding,
    delete,
    finding,
    set_value,
    split,
)
from components.config_reading import as_read, json_value, value_at, written_in
from components.config_rules_deepspeed import LOST_SAVE
from components.config_rules_keys import (
    MAX_SEARCHES,
    OWNED,
    Names,
    UnknownKey,
    judge_unknown,
    unreadable,
)
from components.config_strategy import OFFLOADED_FROM_STAGE
from components.yaml_text import KeyPath

NAMES: Names = tuple(deepspeed_keys.KEYS.items())


def rules_of_json(data: dict) -> Iterator[Finding]:
    """Check a DeepSpeed JSON against all rules about it."""
    yield from names_in_json(data)
    yield from json_configures_zero(data)
    yield from sections_of_json_hold_keys(data)
    yield from command_line_owns_it_in_json(data)
    yield from accumulation_is_left_open(data)
    yield from values_of_json_are_readable(data)
    yield from zero3_can_save_by_json(data)
    yield from stage_offloads_it_by_json(data)
    yield from one_precision_is_on(data)
    yield from autos_are_filled_in(data)


def json_configures_zero(data: dict) -> Iterator[Finding]:
    """accelerate needs the section of ZeRO."""
    if "zero_optimization" not in data:
        reason = "missing: accelerate needs it"
        yield finding(STOPS, "zero_optimization", reason, '{"stage": 0 to 3}')


def sections_of_json_hold_keys(data: dict) -> Iterator[Finding]:
    """A section has keys; some sections may be null instead."""
    for path in deepspeed_keys.MUST_BE_SECTIONS:
        *sections, key = split(path)
        value = written_in(data, *sections).get(key, {})
        if isinstance(value, dict) or (value is None and path in deepspeed_keys.MAY_BE_NULL):
            continue
        first_key = (*deepspeed_keys.KEYS.get(split(path), ()), "key")[0]
        fix = f'{{"{first_key}": ...}}, or delete it'
        if path in keys.OWNED_BY_THE_RECIPE:
            fix = [delete(path)]
        yield finding(STOPS, path, "must be a mapping", fix)


def command_line_owns_it_in_json(data: dict) -> Iterator[Finding]:
    """Everything about learning is "auto", or left out if it is a section."""
    for key, flag in keys.OWNED_BY_THE_RECIPE.items():
        if data.get(key, "auto") == "auto":
            continue
        edit = set_value(key, "auto")
        if key in deepspeed_keys.MUST_BE_SECTIONS:
            edit = delete(key)
        yield finding(RECIPE, key, OWNED.format(flag), [edit])


def accumulation_is_left_open(data: dict) -> Iterator[Finding]:
    """Without the key, accelerate assumes 1, whatever the command line of a recipe says."""
    path = "gradient_accumulation_steps"
    if path not in data:
        reason = "missing: accelerate makes it 1, which the recipes refuse"
        yield finding(RECIPE, path, reason, [set_value(path, "auto")])


def values_of_json_are_readable(data: dict) -> Iterator[Finding]:
    """DeepSpeed has this stage and these devices."""
    for key in deepspeed_keys.WHEN_MISSING:
        path = deepspeed_keys.IN_JSON[key]
        choices = keys.DEEPSPEED[key]
        if json_value(data, path, auto=None) not in (None, *choices):
            yield unreadable(split(path), json_value(data, path), choices)


def zero_stage_of(data: dict) -> int:
    """Return the ZeRO stage of a JSON."""
    return as_read({}, data)["deepspeed_config"]["zero_stage"]


def zero3_can_save_by_json(data: dict) -> Iterator[Finding]:
    """ZeRO-3 only gathers the weights for a save if the config requests it."""
    path = deepspeed_keys.IN_JSON["zero3_save_16bit_model"]
    if zero_stage_of(data) == 3 and json_value(data, path) is not True:
        yield finding(UNSAVED, path, f"{LOST_SAVE} (auto is false)", [set_value(path, True)])


def stage_offloads_it_by_json(data: dict) -> Iterator[Finding]:
    """ZeRO-1 and higher stages offload optimizer state, and only ZeRO-3 offloads parameters."""
    stage = zero_stage_of(data)
    for what, first in OFFLOADED_FROM_STAGE.items():
        path = f"zero_optimization.{what}.device"
        if stage < first and json_value(data, path, auto="none", missing="none") != "none":
            reason = f"ZeRO-{stage} does not offload this"
            yield finding(IGNORED, path, reason, f"stage {first}, or delete it")


def one_precision_is_on(data: dict) -> Iterator[Finding]:
    """Either bf16 or fp16 is on; "auto" leaves it to the launcher's --mixed_precision."""
    bf16 = json_value(data, "bf16.enabled")
    fp16 = json_value(data, "fp16.enabled")
    if bf16 is True and fp16 is True:
        yield finding(STOPS, "fp16.enabled", "bf16 and fp16 at once", "keep one of them")
    elif bf16 is not True and fp16 is not True and "auto" in (bf16, fp16):
        path = "bf16.enabled" if bf16 == "auto" else "fp16.enabled"
        reason = "auto is fp32 here, unless --mixed_precision is passed"
        yield finding(COSTS, path, reason, [set_value(path, True)])


def autos_are_filled_in(data: dict) -> Iterator[Finding]:
    """accelerate knows which value to put in place of each "auto"."""
    for path in unfilled_autos(data):
        yield finding(STOPS, path, "accelerate has no value for this auto", [delete(path)])


def unfilled_autos(section: dict, path: KeyPath = ()) -> Iterator[KeyPath]:
    """Yield the paths of the values "auto" that accelerate does not fill in.

    Settings that the recipes own are left to `command_line_owns_it_in_json`.
    """
    for key, value in section.items():
        inner = (*path, key)
        if isinstance(value, dict) and key not in keys.OWNED_BY_THE_RECIPE:
            yield from unfilled_autos(value, inner)
        elif value == "auto" and ".".join(inner) not in deepspeed_keys.AUTO_IS_FILLED_IN:
            yield inner


# ---- Names ----
def names_in_json(data: dict) -> Iterator[Finding]:
    """DeepSpeed knows all keys: it ignores unknown ones at the top level, and stops at others."""
    searches = 0
    for path in unknown_in_json(data):
        if path[0] in deepspeed_keys.REMOVED:
            yield finding(STOPS, path, "removed from DeepSpeed", [delete(path)])
            continue
        names = ()
        if searches < MAX_SEARCHES:
            names = NAMES
        searches += 1
        yield judge_unknown(unknown_key_of_json(data, path, names))


def unknown_in_json(data: dict) -> Iterator[KeyPath]:
    """Yield the paths of the keys that DeepSpeed knows neither as written nor with `stage3_`."""
    for section, known in deepspeed_keys.KEYS.items():
        inner = value_at(data, section)
        if not isinstance(inner, dict):
            continue
        for key in inner:
            if key not in known and f"stage3_{key}" not in known:
                yield (*section, key)


def unknown_key_of_json(data: dict, path: KeyPath, names: Names) -> UnknownKey:
    """Return a key that DeepSpeed does not know, with its effect and what it may mean."""
    kind = IGNORED
    reason = "no such key: DeepSpeed ignores it silently"
    if len(path) > 1:
        kind = STOPS
        reason = "no such key: DeepSpeed stops once the model is loaded"
    return UnknownKey(path, value_at(data, path), kind, reason, names, data)
