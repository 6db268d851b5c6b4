# SPDX-License-Identifier: Apache-2.0
"""The tables of keys are those of the installed accelerate."""

from accelerate.commands.config.config_args import BaseConfig, ClusterConfig
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import TERecipeKwargs, constants, dataclasses, str_to_bool
from torch._inductor import list_mode_options

from components import accelerate_keys as keys

TITLES = {
    "fsdp_config": "FSDP Arguments",
    "deepspeed_config": "DeepSpeed Arguments",
    "fp8_config": "FP8 Arguments",
    "megatron_lm_config": "Megatron-LM Arguments",
    "mpirun_config": "MPI Arguments",
    "parallelism_config": "ParallelismConfig Arguments",
    "dynamo_config": "Resource Selection Arguments",
}
# The launcher has no option of these names, but hands them on.
HANDED_ON = {"fsdp_ignored_modules", "fp8_use_mxfp8_block_scaling"}


def values_of(enumeration):
    return {choice.value for choice in enumeration}


def test_the_keys_of_the_sections_are_the_options_of_the_launcher():
    groups = {
        group.title: {action.dest for action in group._group_actions}
        for group in launch_command_parser()._action_groups
    }
    for section, known in keys.SECTIONS.items():
        options = groups[TITLES[section]]
        if section == "dynamo_config":
            options = {name for name in options if name.startswith("dynamo_")}
        assert set(known) - HANDED_ON == options, section
    assert "use_mxfp8_block_scaling" in TERecipeKwargs.__dataclass_fields__


def test_the_keys_of_the_top_level_are_the_fields_of_the_config():
    fields = set(ClusterConfig.__dataclass_fields__) | set(BaseConfig.__dataclass_fields__)
    assert {*keys.TOP_LEVEL, *keys.SECTIONS} == fields | {"fp16", "dynamo_backend"}


def test_the_choices_are_those_of_the_installed_accelerate():
    assert list(keys.STRATEGIES) == constants.FSDP_SHARDING_STRATEGY
    assert list(keys.WRAP_POLICIES) == constants.FSDP_AUTO_WRAP_POLICY
    assert list(keys.PREFETCHES) == constants.FSDP_BACKWARD_PREFETCH
    assert list(keys.STATE_DICT_TYPES) == constants.FSDP_STATE_DICT_TYPE
    assert set(keys.MULTINODE_LAUNCHERS) == set(constants.DEEPSPEED_MULTINODE_LAUNCHERS)
    assert set(keys.DYNAMO_MODES) == {*constants.TORCH_DYNAMO_MODES, *list_mode_options()}
    assert list(keys.DYNAMO_BACKENDS) == [choice.value for choice in dataclasses.DynamoBackend]
    assert set(keys.ENGINES) == values_of(dataclasses.DistributedType)
    assert set(keys.PRECISIONS) == values_of(dataclasses.PrecisionType)
    assert {*keys.FP8["fp8_backend"], "NO"} == values_of(dataclasses.FP8BackendType)


def test_the_words_for_true_and_false_are_those_of_the_installed_accelerate():
    assert {word: bool(str_to_bool(word)) for word in keys.TRUTHS} == keys.TRUTHS


def test_a_strategy_is_read_from_its_name_its_number_and_a_truth():
    for value, strategy in (
        ("full_shard", "FULL_SHARD"),
        (1, "FULL_SHARD"),
        (3, "NO_SHARD"),
        ("5", "HYBRID_SHARD_ZERO2"),
        (True, "FULL_SHARD"),
        ("no", "SHARD_GRAD_OP"),
    ):
        assert keys.read_value("fsdp_sharding_strategy", value, keys.STRATEGY) == strategy
    assert not keys.is_readable("fsdp_sharding_strategy", 6, keys.STRATEGY)


def test_case_only_matters_where_accelerate_compares_it():
    assert keys.read_value("mixed_precision", "BF16", keys.PRECISIONS) == "bf16"
    assert not keys.is_readable("distributed_type", "fsdp", keys.ENGINES)
