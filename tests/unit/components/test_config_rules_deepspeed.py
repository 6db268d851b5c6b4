# SPDX-License-Identifier: Apache-2.0
"""accelerate and DeepSpeed do with a DeepSpeed JSON what the rules say."""

import copy
import json
from contextlib import nullcontext

import pytest
import yaml
from accelerate.utils import DeepSpeedPlugin
from deepspeed.runtime.config import DeepSpeedConfig

from accelerate_judge import deepspeed_run, write
from broken_configs import DEEPSPEED_JSON, ZERO_WITHOUT_PRECISION
from components import accelerate_keys, config_rules, deepspeed_keys
from components.config_files import find_faults, load
from components.config_findings import RECIPE, STOPS, UNTESTED, split
from components.config_rules_deepspeed_json import rules_of_json

pytestmark = pytest.mark.usefixtures("pretended_gpu")
OTHER_VALUES = {
    "zero_stage": 3,
    "zero3_init_flag": "true",
    "deepspeed_multinode_launcher": "standard",
}
SAVE = "stage3_gather_16bit_weights_on_model_save"


def yaml_for(path):
    """A YAML that points to a DeepSpeed JSON."""
    return ZERO_WITHOUT_PRECISION + f"  deepspeed_config_file: {path}\n"


@pytest.mark.parametrize("key", list(accelerate_keys.DEEPSPEED))
def test_accelerate_refuses_beside_a_deepspeed_file_what_the_rules_refuse(key, tmp_path):
    text = yaml_for(write(tmp_path, json.dumps(DEEPSPEED_JSON), "ds.json"))
    if key != "deepspeed_config_file":
        text += f"  {key}: {OTHER_VALUES.get(key, '1')}\n"
    findings, _ = config_rules.check(yaml.safe_load(text), DEEPSPEED_JSON)
    refused = [item.path[-1] for item in findings if "refuses" in item.reason]
    assert refused == ([key] if key in deepspeed_keys.IN_JSON else [])
    with pytest.raises(ValueError, match="will be ignored") if refused else nullcontext():
        deepspeed_run(tmp_path, text)


def test_auto_is_what_the_rules_say(tmp_path):
    data = copy.deepcopy(DEEPSPEED_JSON)
    data["bf16"]["enabled"] = "auto"
    data["zero_optimization"][SAVE] = "auto"
    del data["gradient_accumulation_steps"]
    text = yaml_for(write(tmp_path, json.dumps(data), "ds.json"))
    made = deepspeed_run(tmp_path, text)
    assert made["bf16"]["enabled"] is False
    assert made["gradient_accumulation_steps"] == 1
    assert made["zero_optimization"][SAVE] is False
    in_bf16 = deepspeed_run(tmp_path, text, "--mixed_precision", "bf16")
    assert in_bf16["bf16"]["enabled"] is True
    findings, _ = config_rules.check(yaml.safe_load(text), data)
    assert {item.dotted_path for item in findings} == {
        "bf16.enabled",
        "gradient_accumulation_steps",
        f"zero_optimization.{SAVE}",
    }


@pytest.mark.parametrize(("size", "paths"), [(1, []), (2, ["tensor_parallel.autotp_size"])])
def test_tensor_parallelism_of_deepspeed_is_refused_by_the_recipes_alone(size, paths):
    data = copy.deepcopy(DEEPSPEED_JSON)
    data["tensor_parallel"] = {"autotp_size": size}
    before = list(rules_of_json(DEEPSPEED_JSON))
    found = [item for item in rules_of_json(data) if item not in before]
    assert [(item.dotted_path, item.kind) for item in found] == [(path, RECIPE) for path in paths]


@pytest.mark.parametrize(("size", "kinds"), [(1, []), (4, [UNTESTED])])
def test_deepspeeds_own_size_of_sequence_parallelism_is_no_unknown_key(size, kinds):
    data = {**DEEPSPEED_JSON, "sequence_parallel_size": size}
    found = [item for item in rules_of_json(data) if item.path == ("sequence_parallel_size",)]
    assert [item.kind for item in found] == kinds


def test_an_auto_that_accelerate_does_not_fill_in_is_found():
    data = copy.deepcopy(DEEPSPEED_JSON)
    data["zero_optimization"]["sub_group_size"] = "auto"
    reasons = [item.reason for item in rules_of_json(data)]
    assert any("accelerate has no value" in reason for reason in reasons)


@pytest.mark.parametrize("key", ["stage3_max_reuse_distance", "max_reuse_distance"])
def test_a_number_that_deepspeed_refuses_is_found(key):
    data = copy.deepcopy(DEEPSPEED_JSON)
    data["zero_optimization"][key] = -1
    reasons = {item.path[-1]: item.reason for item in rules_of_json(data) if item.kind == STOPS}
    assert reasons[key] == "-1: must be 0 or more"


@pytest.mark.parametrize("value", ["cpu", True, None])
@pytest.mark.parametrize("path", deepspeed_keys.MUST_BE_SECTIONS)
def test_a_section_that_is_none_stops_where_the_rules_say_so(path, value):
    data = {
        "train_batch_size": 1,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": 2},
    }
    *sections, key = split(path)
    inner = data
    for section in sections:
        inner = inner[section]
    inner[key] = value
    found = [item.dotted_path for item in rules_of_json(data) if item.reason == "must be a mapping"]
    may_be = value is None and path in deepspeed_keys.MAY_BE_NULL
    assert found == ([] if may_be else [path])
    try:
        plugin = DeepSpeedPlugin(hf_ds_config=data, gradient_clipping=1.0)
        plugin.set_mixed_precision("no")
        DeepSpeedConfig(plugin.deepspeed_config)
    except Exception as error:  # either may raise any kind of error
        assert found, error
    else:
        assert not found


def test_nothing_runs_with_a_section_that_is_none(tmp_path):
    data = {"zero_optimization": {"stage": 2, "offload_optimizer": "cpu"}, "bf16": True}
    text = yaml_for(write(tmp_path, json.dumps(data), "ds.json"))
    findings, _ = find_faults(load(write(tmp_path, text)))
    assert STOPS in [item.kind for item in findings]
    with pytest.raises(AttributeError):
        deepspeed_run(tmp_path, text)
