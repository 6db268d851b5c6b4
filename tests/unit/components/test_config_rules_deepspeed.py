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
from components.config_findings import split
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
