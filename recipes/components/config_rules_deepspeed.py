# SPDX-License-Identifier: Apache-2.0
"""Rules on deepspeed_config, whose settings are in the YAML or in a JSON, but not in both."""

from collections.abc import Iterator
from typing import Any

from components import accelerate_keys as keys
from components import deepspeed_keys
from components.config_findings import (
    COSTS,
    IGNORED,
    RECIPE,
    STOPS,
    Finding,
    delete,
    finding,
    set_value,
)
from components.config_reading import Config, json_value, precision_of_json
from components.config_rules_keys import OWNED
from components.config_strategy import OFFLOADED_FROM_STAGE

STAGE = "deepspeed_config.zero_stage"
SAVE = "deepspeed_config.zero3_save_16bit_model"
INIT = "deepspeed_config.zero3_init_flag"
LOST_SAVE = (
    "without it accelerator.get_state_dict fails at the final save, after the training; "
    "transformers' Trainer then saves a checkpoint of ZeRO's shards instead; the recipes save "
    "without it"
)


def rules_of_deepspeed(config: Config) -> Iterator[Finding]:
    """Check deepspeed_config against all rules about it."""
    if config.engine != "DEEPSPEED":
        return
    yield from compiler_is_passed_on(config)
    if config.has_json:
        yield from json_exists(config)
        yield from only_the_json_sets_it(config)
        return
    yield from accumulation_is_a_number(config)
    yield from command_line_owns_it(config)
    yield from stage_is_written(config)
    for what in OFFLOADED_FROM_STAGE:
        yield from stage_offloads_it(config, what)
        yield from nvme_has_a_path(config, what)
    yield from zero3_can_save(config)
    yield from zero3_loads_in_parts(config)


def json_exists(config: Config) -> Iterator[Finding]:
    """deepspeed_config_file names a file."""
    if config.deepspeed is None:
        path = "deepspeed_config.deepspeed_config_file"
        yield finding(STOPS, path, "no JSON file of this name", "its path")


def only_the_json_sets_it(config: Config) -> Iterator[Finding]:
    """accelerate refuses a YAML that sets what belongs into its JSON."""
    for key, name_in_json in deepspeed_keys.IN_JSON.items():
        path = f"deepspeed_config.{key}"
        is_written = key in config.zero_written
        value = config.zero_written.get(key)
        if key == "mixed_precision" and not is_written:
            path = key
            value = config.written.get(key)
            is_written = value is not None
        if is_written:
            reason = "accelerate refuses it beside deepspeed_config_file"
            fix = f"delete it; in the JSON it is {name_in_json}"
            if is_said_by_the_json(config, key, value):
                fix = [delete(path)]
            yield finding(STOPS, path, reason, fix)


def is_said_by_the_json(config: Config, key: str, value: Any) -> bool:
    """Return whether the JSON says the same as a key of the YAML, which then can be deleted.

    An empty key says nothing, but counts as written: the launcher passes the names of the keys on.
    """
    if value is None:
        return True
    if config.deepspeed is None:
        return False
    if key == "mixed_precision":
        return precision_of_json(config.deepspeed) == value
    missing = deepspeed_keys.WHEN_MISSING.get(key)
    return json_value(config.deepspeed, deepspeed_keys.IN_JSON[key], missing=missing) == value


def accumulation_is_a_number(config: Config) -> Iterator[Finding]:
    """Accelerator turns the number into an int, also "auto", unless transformers' Trainer runs it.

    Without the key, DeepSpeed's plugin has "auto" all the same, and Accelerator its own number.
    """
    path = "deepspeed_config.gradient_accumulation_steps"
    value = config.zero_written.get("gradient_accumulation_steps")
    if value is None:
        return
    if keys.is_readable("gradient_accumulation_steps", value, keys.INT):
        if int(value) < 1:
            reason = f"{value}: a step has at least one micro-batch"
            yield finding(STOPS, path, reason, "1 or more")
        return
    reason = f"{value}: Accelerator() needs a whole number; only transformers' Trainer sets its own"
    yield finding(STOPS, path, reason, [delete(path)] if value == "auto" else "a whole number")


def compiler_is_passed_on(config: Config) -> Iterator[Finding]:
    """The launcher of DeepSpeed passes nothing of dynamo_config on."""
    backend = config.read.get("dynamo_config", {}).get("dynamo_backend", "NO")
    if "dynamo_backend" in config.written:
        backend = config.read.get("dynamo_backend", "NO")
    if backend != "NO":
        path = "dynamo_backend"
        if path not in config.written:
            path = "dynamo_config"
        reason = "the launcher does not pass it on under DeepSpeed: nothing is compiled"
        yield finding(IGNORED, path, reason, [delete(path)])


def command_line_owns_it(config: Config) -> Iterator[Finding]:
    """Everything about learning belongs on the command line of the recipes."""
    for key, flag in keys.OWNED_BY_THE_RECIPE.items():
        if key not in keys.DEEPSPEED:
            continue  # rules_of_names report it
        if config.zero_written.get(key, "auto") not in ("auto", None):
            path = f"deepspeed_config.{key}"
            yield finding(RECIPE, path, OWNED.format(flag), [delete(path)])


def stage_is_written(config: Config) -> Iterator[Finding]:
    """Without a stage, accelerate runs ZeRO-2."""
    written = config.zero_written
    if "zero_stage" in written or "zero_stage" in config.elsewhere("deepspeed_config"):
        return
    fix = [set_value(STAGE, 2)]
    if isinstance(written.get("zero_optimization"), dict):
        fix = "zero_stage: the stage in zero_optimization"
    yield finding(COSTS, STAGE, "missing: ZeRO-2 runs", fix)


def stage_offloads_it(config: Config, what: str) -> Iterator[Finding]:
    """ZeRO-1 and higher stages offload optimizer state, and only ZeRO-3 offloads parameters."""
    stage = config.zero["zero_stage"]
    first = OFFLOADED_FROM_STAGE[what]
    if config.zero[f"{what}_device"] != "none" and stage < first:
        path = f"deepspeed_config.{what}_device"
        reason = f"ZeRO-{stage} does not offload this"
        yield finding(IGNORED, path, reason, f"zero_stage: {first}, or delete it")


def nvme_has_a_path(config: Config, what: str) -> Iterator[Finding]:
    """The launcher passes the device on, but not the path."""
    if config.zero[f"{what}_device"] == "nvme":
        path = f"deepspeed_config.{what}_device"
        reason = f"the launcher drops {what}_nvme_path: DeepSpeed would swap to the folder ./none"
        yield finding(IGNORED, path, reason, "a deepspeed_config_file that names the path")


def zero3_can_save(config: Config) -> Iterator[Finding]:
    """ZeRO-3 only gathers the weights for a save if the config requests it."""
    if config.zero["zero_stage"] == 3 and not config.zero.get("zero3_save_16bit_model"):
        fix = [set_value(SAVE, True)]
        yield finding(COSTS, SAVE, LOST_SAVE, fix)


def zero3_loads_in_parts(config: Config) -> Iterator[Finding]:
    """ZeRO-3 can split the model while loading it."""
    if config.zero["zero_stage"] == 3 and config.zero.get("zero3_init_flag") is False:
        reason = "each process first loads the whole model into host memory"
        yield finding(COSTS, INIT, reason, [set_value(INIT, True)])
