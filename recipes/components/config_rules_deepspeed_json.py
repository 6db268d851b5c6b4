# SPDX-License-Identifier: Apache-2.0
"""Rules on a DeepSpeed JSON to which a config of accelerate points."""

import math
import re
from collections.abc import Iterator
from typing import Any

from components import accelerate_keys as keys
from components import deepspeed_keys
from components.config_findings import (
    COSTS,
    IGNORED,
    RECIPE,
    STOPS,
    UNTESTED,
    Edit,
    Finding,
    delete,
    finding,
    set_value,
    split,
)
from components.config_names import is_comment
from components.config_reading import as_read, is_true, json_value, value_at, written_in
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
from components.yaml_text import KeyPath, as_yaml

NAMES: Names = tuple(deepspeed_keys.KEYS.items())
GATHER = deepspeed_keys.IN_JSON["zero3_save_16bit_model"]
BATCH = "train_batch_size"
MICRO_BATCH = "train_micro_batch_size_per_gpu"


def rules_of_json(data: dict) -> Iterator[Finding]:
    """Check a DeepSpeed JSON against all rules about it."""
    yield from names_in_json(data)
    yield from json_configures_zero(data)
    yield from sections_of_json_hold_keys(data)
    yield from command_line_owns_it_in_json(data)
    yield from accumulation_is_left_open(data)
    yield from json_splits_no_matrices(data)
    yield from json_splits_no_rows(data)
    yield from batch_has_a_micro_batch(data)
    yield from values_of_json_are_readable(data)
    yield from values_of_sections_are_readable(data)
    yield from stage_is_a_number(data)
    yield from field_has_one_name(data)
    yield from zero_keeps_the_order_of_weights(data)
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
        edits: list[Edit] = [set_value(key, "auto")]
        if key in deepspeed_keys.MUST_BE_SECTIONS:
            edits = [delete(key)]
        if key == BATCH and MICRO_BATCH not in data:
            edits.append(set_value(MICRO_BATCH, "auto"))
        yield finding(RECIPE, key, OWNED.format(flag), edits)


def json_splits_no_matrices(data: dict) -> Iterator[Finding]:
    """The recipes give each process rows of its own, and those of such a group need the same."""
    path = "tensor_parallel.autotp_size"
    size = value_at(data, split(path))
    if isinstance(size, int) and size > 1:
        reason = "DeepSpeed splits matrices over processes, and the recipes give these other rows"
        yield finding(RECIPE, path, reason, [delete(path)])


def json_splits_no_rows(data: dict) -> Iterator[Finding]:
    """DeepSpeed only counts the batch by it (runtime/config.py, DeepSpeedConfig)."""
    key = "sequence_parallel_size"
    if key in data and data[key] != 1:
        reason = (
            "for scripts that set up Ulysses themselves; the recipes split rows by a "
            "parallelism_config, as in deepspeed_ulysses.yaml"
        )
        yield finding(UNTESTED, key, reason, [delete(key)])


def batch_has_a_micro_batch(data: dict) -> Iterator[Finding]:
    """accelerate fills in the batch of all GPUs from that of one, so it needs the latter."""
    if data.get(BATCH) == "auto" and data.get(MICRO_BATCH) is None:
        reason = f"accelerate fills this auto in from {MICRO_BATCH}, which is missing"
        yield finding(STOPS, BATCH, reason, [set_value(MICRO_BATCH, "auto")])


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


def values_of_sections_are_readable(data: dict) -> Iterator[Finding]:
    """DeepSpeed reads the values of its sections by their kinds, and leaves out "auto"."""
    for section, known in deepspeed_keys.STRICT_SECTIONS.items():
        inner = value_at(data, section)
        if not isinstance(inner, dict):
            continue
        for key, value in inner.items():
            path = (*section, key)
            kind = known.get(key, known.get(f"stage3_{key}", deepspeed_keys.ANYTHING))
            if ".".join(path) in deepspeed_keys.MUST_BE_SECTIONS or value == "auto":
                continue
            # DeepSpeed also knows the keys of ZeRO-3 without what begins them.
            limited = path if key in known else (*section, f"stage3_{key}")
            wanted = kind
            if is_of_kind(value, kind, path):
                wanted = None if value is None else limit_of(value, limited)
            if wanted is not None:
                yield finding(STOPS, path, f"{as_yaml(value)}: must be {wanted}", wanted)


def is_of_kind(value: Any, kind: str, path: KeyPath) -> bool:
    """Return whether pydantic reads a value as a kind, as DeepSpeed uses it."""
    if kind == deepspeed_keys.ANYTHING:
        return True
    if value is None:
        return ".".join(path) in deepspeed_keys.MAY_BE_NULL_IN_SECTIONS
    if kind == deepspeed_keys.BOOL:
        return str(value).lower() in keys.TRUTHS or value in (0.0, 1.0)
    if isinstance(value, bool) and ".".join(path) in deepspeed_keys.TAKE_NO_TRUTH:
        return False
    try:
        number = float(value)
    except (TypeError, ValueError):
        return False
    if not math.isfinite(number):
        return kind == deepspeed_keys.FLOAT and path != ("fp16", "loss_scale")
    if kind == deepspeed_keys.INT and isinstance(value, str):
        return re.fullmatch(r"[+-]?\d+(\.0*)?", value.strip()) is not None
    return kind == deepspeed_keys.FLOAT or number == int(number)


def limit_of(value: Any, path: KeyPath) -> str | None:
    """Return what the number at a key has to be if DeepSpeed refuses this one, or None."""
    key = ".".join(path)
    if key in deepspeed_keys.POSITIVE and float(value) <= 0:
        return "above 0"
    if key in deepspeed_keys.NOT_NEGATIVE and float(value) < 0:
        return "0 or more"
    if key in deepspeed_keys.SHARES and not 0 <= float(value) <= 1:
        return "from 0 to 1"
    return None


def stage_is_a_number(data: dict) -> Iterator[Finding]:
    """DeepSpeed takes the stage as text, but accelerate compares it with numbers."""
    path = "zero_optimization.stage"
    value = json_value(data, path)
    if isinstance(value, str) and value in ("0", "1", "2", "3"):
        reason = f"text: DeepSpeed runs ZeRO-{value}, but accelerate does not know that"
        yield finding(IGNORED, path, reason, [set_value(path, int(value))])


def field_has_one_name(data: dict) -> Iterator[Finding]:
    """DeepSpeed takes the name of a field in place of its alias, but refuses both at once."""
    zero = value_at(data, ("zero_optimization",))
    if not isinstance(zero, dict):
        return
    for alias in deepspeed_keys.ZERO:
        others = deepspeed_keys.OTHER_NAMES.get(alias, (alias.removeprefix("stage3_"),))
        for name in others:
            if name != alias and name in zero and alias in zero:
                reason = f"the same as {alias}, which is written too: DeepSpeed refuses both"
                fix = "keep one of them"
                if zero[name] == zero[alias]:
                    fix = [delete(("zero_optimization", name))]
                yield finding(STOPS, ("zero_optimization", name), reason, fix)


def zero_stage_of(data: dict) -> int:
    """Return the ZeRO stage of a JSON."""
    return as_read({}, data)["deepspeed_config"]["zero_stage"]


def zero_keeps_the_order_of_weights(data: dict) -> Iterator[Finding]:
    """ZeRO links weights in another order (stage_1_and_2.py, _link_all_hp_params)."""
    path = "zero_optimization.round_robin_gradients"
    if zero_stage_of(data) in (1, 2) and is_true(json_value(data, path)):
        reason = "DeepSpeed itself looks for weights in their old order, and checkpoints are wrong"
        yield finding(RECIPE, path, reason, [delete(path)])


def zero3_can_save_by_json(data: dict) -> Iterator[Finding]:
    """ZeRO-3 only gathers the weights for a save if the config requests it, by any of the names."""
    section, alias = split(GATHER)
    names = (alias, *deepspeed_keys.OTHER_NAMES[alias])
    if zero_stage_of(data) == 3 and not any(gathers(data, section, name) for name in names):
        written = [name for name in names if json_value(data, f"{section}.{name}") is not None]
        path = (section, *written[:1]) if written else (section, alias)
        yield finding(COSTS, path, f"{LOST_SAVE} (auto is false)", [set_value(path, True)])


def gathers(data: dict, section: str, name: str) -> bool:
    """Return whether a name in a section of a JSON is true."""
    return is_true(json_value(data, f"{section}.{name}"))


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
    if is_true(bf16) and is_true(fp16):
        yield finding(STOPS, "fp16.enabled", "bf16 and fp16 at once", "keep one of them")
    elif not is_true(bf16) and not is_true(fp16) and "auto" in (bf16, fp16):
        path = "bf16.enabled" if bf16 == "auto" else "fp16.enabled"
        reason = (
            "auto is fp32 unless --mixed_precision is passed or transformers' Trainer, which "
            "fills it in, runs the training"
        )
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
    """DeepSpeed knows all keys: it ignores some unknown ones, and stops at others.

    A key that only holds a remark may stand where DeepSpeed says nothing to it.
    """
    searches = 0
    for path in unknown_in_json(data):
        if path[0] in deepspeed_keys.REMOVED:
            yield finding(STOPS, path, "removed from DeepSpeed", [delete(path)])
            continue
        if is_comment(path[-1]) and path[:-1] not in deepspeed_keys.STRICT_SECTIONS:
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
    if path[:-1] in deepspeed_keys.STRICT_SECTIONS:
        kind = STOPS
        reason = "no such key: DeepSpeed stops once the model is loaded"
    if path[:-1] == ("bf16",) and path[-1] in deepspeed_keys.FP16:
        reason += "; only fp16 scales the loss"
        names = ((path[:-1], ()),)
    if is_comment(path[-1]):
        names = ((path[:-1], ()),)
    if path[0] in accelerate_sets_by_yaml(path):
        reason += "; accelerate's YAML has it, in deepspeed_config"
    return UnknownKey(path, value_at(data, path), kind, reason, names, data, obstacle_in_json)


def accelerate_sets_by_yaml(path: KeyPath) -> tuple[str, ...]:
    """Return the keys of accelerate's YAML that no JSON has, for a key at the top level."""
    if len(path) > 1:
        return ()
    return tuple(key for key in keys.DEEPSPEED if key not in deepspeed_keys.TOP_LEVEL)


def obstacle_in_json(path: KeyPath, value: Any) -> str:
    """Return why a value cannot be written at a known path, or "" if it can."""
    kind = deepspeed_keys.STRICT_SECTIONS.get(path[:-1], {}).get(path[-1], deepspeed_keys.ANYTHING)
    if ".".join(path) in deepspeed_keys.MUST_BE_SECTIONS:
        can = isinstance(value, dict)
    else:
        can = value == "auto" or is_of_kind(value, kind, path)
    return "" if can else f"does not take {as_yaml(value)}"
