# SPDX-License-Identifier: Apache-2.0
"""The tables of the DeepSpeed JSON's keys are those of the installed deepspeed."""

import pytest
from deepspeed.runtime import config, precision_config
from deepspeed.runtime.zero import config as zero
from deepspeed.runtime.zero import offload_config
from pydantic import ValidationError

from components import deepspeed_keys

MODELS = {
    ("zero_optimization",): zero.DeepSpeedZeroConfig,
    ("zero_optimization", "offload_param"): offload_config.DeepSpeedZeroOffloadParamConfig,
    ("zero_optimization", "offload_optimizer"): offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    ("bf16",): precision_config.DeepSpeedBF16Config,
    ("fp16",): precision_config.DeepSpeedFP16Config,
}


class Watched(dict):
    """A dict that remembers the keys it was asked for."""

    def __init__(self, **content):
        super().__init__(**content)
        self.asked = set()

    def __contains__(self, key):
        self.asked.add(key)
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked.add(key)
        return super().get(key, default)

    def keys(self):
        return self

    def __deepcopy__(self, memo):
        return self


def test_the_keys_of_the_top_level_are_those_that_deepspeed_asks_for():
    watched = Watched(train_micro_batch_size_per_gpu=1)
    config.DeepSpeedConfig(watched)
    removed = set(deepspeed_keys.REMOVED)
    assert removed == set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    assert set(deepspeed_keys.TOP_LEVEL) == watched.asked - removed


@pytest.mark.parametrize("section", MODELS, ids=".".join)
def test_the_keys_of_a_section_are_those_of_its_model_which_refuses_others(section):
    model = MODELS[section]
    names = {field.alias or name for name, field in model.model_fields.items()}
    assert set(deepspeed_keys.KEYS[section]) == names
    with pytest.raises(ValidationError):
        model(no_such_key=1)


def test_every_section_with_known_keys_has_a_model():
    assert set(deepspeed_keys.KEYS) == {(), *MODELS}


def test_deepspeed_says_nothing_to_unknown_keys_at_the_top_level():
    content = {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 3}}
    config.DeepSpeedConfig(content)
