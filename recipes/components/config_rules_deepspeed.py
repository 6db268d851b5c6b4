# SPDX-License-Identifier: Apache-2.0
"""Rules on deepspeed_config, whose settings are in the YAML or in a JSON, but not in both."""

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
)
from components.config_reading import Config
from components.config_rules_keys import OWNED
from components.config_strategy import OFFLOADED_FROM_STAGE

STAGE = "deepspeed_config.zero_stage"
SAVE = "deepspeed_config.zero3_save_16bit_model"
INIT = "deepspeed_config.zero3_init_flag"
LOST_SAVE = "without it accelerator.get_state_dict fails at the final save, after the training"


def rules_of_deepspeed(config: Config) -> Iterator[Finding]:
    """Check deepspeed_config against all rules about it."""
    if config.engine != "DEEPSPEED":
        return
    if "deepspeed_config_file" in config.zero_written:
        yield from json_exists(config)
        yield from only_the_json_sets_it(config)
        return
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
        value = config.zero_written.get(key)
        if key == "mixed_precision":
            path = key
            value = config.written.get(key)
        if value is not None:
            reason = "accelerate refuses it beside deepspeed_config_file"
            yield finding(STOPS, path, reason, f"delete it; in the JSON it is {name_in_json}")


def command_line_owns_it(config: Config) -> Iterator[Finding]:
    """Everything about learning belongs on the command line of the recipes."""
    for key, flag in keys.OWNED_BY_THE_RECIPE.items():
        if config.zero_written.get(key, "auto") not in ("auto", None):
            path = f"deepspeed_config.{key}"
            yield finding(RECIPE, path, OWNED.format(flag), [delete(path)])


def stage_is_written(config: Config) -> Iterator[Finding]:
    """Without a stage, accelerate runs ZeRO-2."""
    if "zero_stage" not in config.zero_written:
        yield finding(COSTS, STAGE, "missing: ZeRO-2 runs", [set_value(STAGE, 2)])


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
        yield finding(UNSAVED, SAVE, LOST_SAVE, [set_value(SAVE, True)])


def zero3_loads_in_parts(config: Config) -> Iterator[Finding]:
    """ZeRO-3 can split the model while loading it."""
    if config.zero["zero_stage"] == 3 and config.zero.get("zero3_init_flag") is False:
        reason = "each process first loads the whole model into host memory"
        yield finding(COSTS, INIT, reason, [set_value(INIT, True)])
