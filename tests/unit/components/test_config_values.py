# SPDX-License-Identifier: Apache-2.0
"""A value stops accelerate if and only if the rules say so, odd and empty ones too."""

import contextlib

import pytest
import yaml

from accelerate_judge import launched, outcome
from broken_configs import DDP, FSDP1, FSDP2, FULL2
from components import config_rules
from components.config_findings import STOPS
from components.config_reading import as_read
from components.config_strategy import shards_of, strategy_of

pytestmark = pytest.mark.usefixtures("pretended_gpu")
MESH = FULL2 + "parallelism_config:\n  parallelism_config_dp_shard_size: 8\n"
RING = MESH.replace("8", "4") + "  parallelism_config_cp_size: 2\n"
RING = RING.replace("num_processes: 4", "num_processes: 8")
COMPILED = DDP + "dynamo_config:\n  dynamo_backend: INDUCTOR\n"
VALUES = ("null", "''", "true", "'no'", "0", "1", "'2'", "2.0", "-1", "auto", "[a]", "NONE", "${X}")
SWEPT = {
    "FSDP1": (
        FSDP1,
        ("fsdp_backward_prefetch", "fsdp_state_dict_type", "fsdp_sync_module_states"),
    ),
    "FSDP2": (
        FSDP2,
        (
            "fsdp_backward_prefetch",
            "fsdp_reshard_after_forward",
            "fsdp_state_dict_type",
            "fsdp_sync_module_states",
            "fsdp_offload_params",
            "fsdp_min_num_params",
        ),
    ),
    "a mesh without a ring": (
        MESH,
        (
            "parallelism_config_tp_size",
            "parallelism_config_cp_size",
            "parallelism_config_cp_backend",
            "parallelism_config_cp_comm_strategy",
            "parallelism_config_sp_seq_length",
            "parallelism_config_sp_seq_length_is_variable",
        ),
    ),
    "a ring": (RING, ("parallelism_config_cp_comm_strategy", "parallelism_config_sp_seq_length")),
    "DDP, not compiled": (
        DDP + "dynamo_config:\n",
        ("dynamo_backend", "dynamo_mode", "dynamo_use_dynamic"),
    ),
    "DDP, compiled": (COMPILED, ("dynamo_use_fullgraph",)),
}


@pytest.mark.parametrize("name", SWEPT)
def test_accelerate_stops_at_a_value_where_the_rules_say_so_and_nowhere_else(name, tmp_path):
    start, keys = SWEPT[name]
    for key in keys:
        for value in VALUES:
            text = f"{start}  {key}: {value}\n"
            findings, _ = config_rules.check(yaml.safe_load(text))
            says_so = [item.dotted_path for item in findings if item.kind == STOPS]
            stopped = outcome(tmp_path, text).stopped
            assert bool(says_so) == bool(stopped), (key, value, says_so, stopped)


@pytest.mark.parametrize(
    ("port", "exists"), [(-1, False), (0, True), (65535, True), (65536, False)]
)
def test_a_port_is_a_number_that_a_port_can_have(port, exists, tmp_path):
    text = f"{DDP}main_process_port: {port}\n"
    findings, _ = config_rules.check(yaml.safe_load(text))
    assert (STOPS not in [item.kind for item in findings]) == exists
    with contextlib.nullcontext() if exists else pytest.raises(OverflowError, match="0-65535"):
        launched(tmp_path, text)


def test_sizes_of_1_are_no_mesh_and_fsdp2_shards_over_all_processes(tmp_path):
    kinds = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = "".join(f"  parallelism_config_{kind}_size: 1\n" for kind in kinds)
    text = FULL2 + "parallelism_config:\n" + sizes
    content = yaml.safe_load(text)
    findings, _ = config_rules.check(content)
    assert not outcome(tmp_path, text).stopped and not findings
    shards = shards_of(strategy_of(as_read(content)), processes=8, processes_per_node=8)
    assert set(shards.values()) == {8}
