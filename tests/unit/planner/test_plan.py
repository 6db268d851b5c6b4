# SPDX-License-Identifier: Apache-2.0
"""From an accelerate config and the recipe's arguments to a plan."""

import pytest

from config_strategy import read
from core.exits import End
from launching import CONFIGS
from planner.plan import plan_of
from planner_jobs import BASE, config_of, training_arguments


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    config_of(BASE | {"width": 128, "depth": 1, "vocab": 1000}).save_pretrained(folder)
    return folder


REFUSED = [
    ("fsdp2_cp", ["--packing"]),
    ("fsdp2_cp", ["--attn_implementation", "eager"]),
    ("fsdp2_cp", ["--padding_free"]),
    ("deepspeed_ulysses", ["--attn_implementation", "eager"]),
]


@pytest.mark.parametrize("name, flags", REFUSED)
def test_what_the_recipe_refuses_under_a_mesh_is_not_planned(name, flags, model):
    config = read(CONFIGS / f"{name}.yaml")
    with pytest.raises(End, match=flags[0]):
        plan_of(training_arguments(model, flags), config)


UNPLANNED = {
    "fsdp_activation_checkpointing": True,
    "fsdp_transformer_layer_cls_to_wrap": "LlamaMLP",
}


@pytest.mark.parametrize("key", UNPLANNED)
def test_keys_that_change_memory_are_not_passed_over(key, model):
    config = read(CONFIGS / "fsdp.yaml")
    config.values[key] = UNPLANNED[key]
    with pytest.raises(End, match=key):
        plan_of(training_arguments(model), config, 4)
