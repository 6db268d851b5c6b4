# SPDX-License-Identifier: Apache-2.0
"""The tables of the DeepSpeed JSON's keys are those of the installed deepspeed."""

import pytest
from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.compile.config import CompileConfig
from deepspeed.monitor import config as monitor
from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig
from deepspeed.runtime import config, precision_config
from deepspeed.runtime.activation_checkpointing.config import (
    DeepSpeedActivationCheckpointingConfig,
)
from deepspeed.runtime.swap_tensor.aio_config import get_aio_config
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero import config as zero
from deepspeed.runtime.zero import offload_config
from pydantic import ValidationError

from components import deepspeed_keys
from components.config_rules_deepspeed_json import is_of_kind, limit_of

MODELS = {
    ("zero_optimization",): zero.DeepSpeedZeroConfig,
    ("zero_optimization", "offload_param"): offload_config.DeepSpeedZeroOffloadParamConfig,
    ("zero_optimization", "offload_optimizer"): offload_config.DeepSpeedZeroOffloadOptimizerConfig,
    ("bf16",): precision_config.DeepSpeedBF16Config,
    ("fp16",): precision_config.DeepSpeedFP16Config,
    ("compile",): CompileConfig,
    ("comms_logger",): CommsLoggerConfig,
    ("tensorboard",): monitor.TensorBoardConfig,
    ("wandb",): monitor.WandbConfig,
    ("csv_monitor",): monitor.CSVConfig,
    ("comet",): monitor.CometConfig,
    ("tensor_parallel",): TPTrainingConfig,
    ("hybrid_engine",): config.HybridEngineConfig,
}
# Sections whose other keys are never looked at, and what reads them
SILENT = {
    ("aio",): get_aio_config,
    ("activation_checkpointing",): DeepSpeedActivationCheckpointingConfig,
    ("flops_profiler",): DeepSpeedFlopsProfilerConfig,
}
# Values of each kind, and values that are not: pydantic also takes words and 1 as truths
TRIED = (True, "yes", 1, 0, -1, 0.5, "7", "0.5", 5e8, "maybe", None, [], {})


# Some keys may only be false in certain stages
BESIDE = {("zero_optimization",): {"stage": 1}}


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


def test_the_keys_of_the_top_level_are_those_that_deepspeed_asks_for(monkeypatch):
    monkeypatch.setattr(config.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(config.dist, "get_world_size", lambda: 1)
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


@pytest.mark.parametrize("section", SILENT, ids=".".join)
def test_deepspeed_reads_the_known_keys_of_a_silent_section_and_no_other(section):
    watched = Watched(no_such_key=1)
    SILENT[section]({section[0]: watched})
    assert watched.asked == set(deepspeed_keys.KEYS[section])


@pytest.mark.parametrize("section", MODELS, ids=".".join)
def test_a_value_is_refused_where_its_kind_says_so(section):
    for key, kind in deepspeed_keys.STRICT_SECTIONS[section].items():
        path = (*section, key)
        if kind == deepspeed_keys.ANYTHING:
            continue
        for value in TRIED:
            try:
                MODELS[section](**BESIDE.get(section, {}), **{key: value})
                takes = True
            except (ValidationError, AssertionError):
                takes = False
            fits = is_of_kind(value, kind, path) and (value is None or not limit_of(value, path))
            assert takes == fits, (path, value)


def test_every_section_with_known_keys_has_a_model():
    assert set(deepspeed_keys.STRICT_SECTIONS) == set(MODELS)
    assert set(deepspeed_keys.KEYS) == {(), *MODELS, *SILENT}


def test_deepspeed_takes_the_name_of_a_field_but_not_beside_its_alias():
    for alias, names in deepspeed_keys.OTHER_NAMES.items():
        for name in names:
            assert zero.DeepSpeedZeroConfig(**{name: True}).gather_16bit_weights_on_model_save
            with pytest.raises((ValidationError, AssertionError)):
                zero.DeepSpeedZeroConfig(**{name: True, alias: True})


def test_the_former_switches_still_offload():
    for key, switch in deepspeed_keys.FORMER_SWITCHES.items():
        offloaded = getattr(zero.DeepSpeedZeroConfig(**{switch: True}), key.removesuffix("_device"))
        assert offloaded.device == "cpu"


def test_deepspeed_says_nothing_to_unknown_keys_at_the_top_level():
    content = {"train_micro_batch_size_per_gpu": 1, "zero_optimisation": {"stage": 3}}
    config.DeepSpeedConfig(content)
