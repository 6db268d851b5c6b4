# SPDX-License-Identifier: Apache-2.0
"""A broken config is fixed as its author meant it, or left to a person; all else stays."""

import pytest
import yaml

from accelerate_judge import GPUS, fsdp_run, questionnaire, write
from broken_configs import BROKEN, FULL2, ZERO2
from components.config_files import ConfigFile, load
from configs.fixes import fix
from configs.reports import check_file
from launching import CONFIGS

pytestmark = pytest.mark.usefixtures("pretended_gpu")


def flat(content):
    """All keys of a config, those of its sections too, in one dict."""
    keys = dict(content)
    for value in content.values():
        if isinstance(value, dict):
            keys |= flat(value)
    return keys


@pytest.mark.parametrize("name", BROKEN)
def test_it_is_fixed_as_its_author_meant_or_left_to_a_person(name, tmp_path):
    case = BROKEN[name]
    fixed = fix(load(write(tmp_path, case.text)), for_recipes=True)
    if case.fixed is None:
        assert case.key in [item.path[-1] for item in fixed.left]
        return
    assert fixed.done
    assert not fixed.left
    keys = flat(fixed.file.content)
    assert {name: keys.get(name) for name in case.fixed} == case.fixed
    again = load(write(tmp_path, fixed.file.text, "fixed.yaml"))
    assert again.content == fixed.file.content
    findings = check_file(again, for_recipes=True).findings
    assert all(item.severity == "info" for item in findings)


def test_a_deepspeed_key_at_the_top_level_moves_unless_the_recipes_own_it(tmp_path):
    text = ZERO2.replace("deepspeed_config:", "gradient_clipping: 1.0\ndeepspeed_config:")
    file = load(write(tmp_path, text))
    moved = fix(file).file.content
    assert moved["deepspeed_config"]["gradient_clipping"] == 1.0
    assert "gradient_clipping" not in moved
    assert "gradient_clipping" not in flat(fix(file, for_recipes=True).file.content)


def test_several_faults_are_fixed_together_and_comments_stay(tmp_path):
    text = (
        "# mine\ndistributed_type: FSDP  # sharded\n\nnum_processes: 8\nfsdp_config:\n  # FSDP1\n"
        "  fsdp_version: 1\n  fsdp_reshard_after_forward: NO_SHARD  # whole\n"
        "  fsdp_offlod_params: false\n"
        "  fsdp_state_dict_type: SHARDED_STATE_DICT\n  gradient_clipping: 1.0\n"
    )
    fixed = fix(load(write(tmp_path, text)))
    assert not fixed.left
    assert fixed.file.text == (
        "# mine\ndistributed_type: FSDP  # sharded\n\nnum_processes: 8\nfsdp_config:\n  # FSDP1\n"
        "  fsdp_version: 1\n  fsdp_sharding_strategy: NO_SHARD  # whole\n"
        "  fsdp_offload_params: false\n"
        "  fsdp_state_dict_type: FULL_STATE_DICT\n"
    )


SEVERAL_NAMES_OF_ONE_KEY = (
    FULL2 + "  fsdp_offload_param: true\n  fsdp_offlod_params: false\n"
    "  offload_params: true\nnum_process: 2\n"
)


def file_of(text):
    return ConfigFile(CONFIGS / "mine.yaml", text, yaml.safe_load(text))


def test_no_key_is_written_twice():
    texts = [SEVERAL_NAMES_OF_ONE_KEY]
    for case in BROKEN.values():
        if case.key != "num_processes" and "tw" not in case.words:
            texts.append(case.text)
    for text in texts:
        fixed = fix(file_of(text)).file
        assert not fixed.positions.written_twice
        assert yaml.safe_load(fixed.text) == fixed.content


def test_no_key_is_written_over_another():
    fixed = fix(file_of(SEVERAL_NAMES_OF_ONE_KEY))
    assert not [item for item in fixed.done if "num_process" in item.path]
    assert fixed.file.content["num_processes"] == 8
    told = {item.path[-1] for item in [*fixed.left, *fixed.done]}
    assert {"fsdp_offload_param", "fsdp_offlod_params", "num_process"} <= told


def test_a_file_in_flow_style_is_fixed_too(tmp_path):
    text = (
        "{distributed_type: FSDP, num_processes: 8, "
        "fsdp_config: {fsdp_version: 2, fsdp_offlod_params: true}}"
    )
    fixed = fix(load(write(tmp_path, text)))
    assert not fixed.left
    assert yaml.safe_load(fixed.file.text)["fsdp_config"]["fsdp_offload_params"] is True


# ---- Files that `accelerate config` writes ----
FSDP1 = GPUS | {"FullyShardedDataParallel": "yes", "FSDP version": 1, "_no_split_modules": "yes"}
FSDP2 = FSDP1 | {"FSDP version": 2}
DEEPSPEED = GPUS | {"want to use DeepSpeed": "yes"}
# Answers, what then runs, {key: severity} of the findings
WRITTEN = {
    "one process": ({"mixed precision": "bf16"}, "one process", {}),
    "DDP": (GPUS, "DDP", {}),
    "FSDP1 FULL_SHARD": (FSDP1, "FSDP1 FULL_SHARD", {"fsdp_reshard_after_forward": "warning"}),
    "FSDP1 SHARD_GRAD_OP": (
        FSDP1 | {"sharding strategy": "SHARD_GRAD_OP"},
        "FSDP1 FULL_SHARD",
        {"fsdp_reshard_after_forward": "error"},
    ),
    "FSDP1 NO_SHARD": (
        FSDP1 | {"sharding strategy": "NO_SHARD"},
        "FSDP1 FULL_SHARD",
        {"fsdp_reshard_after_forward": "error"},
    ),
    "FSDP2": (FSDP2, "FSDP2 FULL_SHARD", {}),
    "FSDP2 without resharding": (FSDP2 | {"resharding": "no"}, "FSDP2 SHARD_GRAD_OP", {}),
    "ZeRO-2": (DEEPSPEED, "DeepSpeed ZeRO-2", {"gradient_accumulation_steps": "error"}),
    "ZeRO-3": (
        DEEPSPEED | {"ZeRO optimization stage": 3},
        "DeepSpeed ZeRO-3",
        {
            "gradient_accumulation_steps": "error",
            "zero3_save_16bit_model": "warning",
            "zero3_init_flag": "warning",
        },
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_file_that_accelerate_config_writes_is_understood_and_fixed(name, monkeypatch, tmp_path):
    answers, runs, expected = WRITTEN[name]
    file = load(questionnaire(monkeypatch, tmp_path, answers))
    checked = check_file(file, for_recipes=True)
    assert checked.does["runs"] == runs
    found = {item.path[-1]: item.severity for item in checked.findings if item.severity != "info"}
    assert found == expected
    fixed = fix(file, for_recipes=True)
    assert not fixed.left
    wanted = answers.get("sharding strategy")
    if wanted:  # What was answered is what then runs.
        told = fsdp_run(tmp_path, fixed.file.text)
        assert told["sharding_strategy"] == f"ShardingStrategy.{wanted}"
