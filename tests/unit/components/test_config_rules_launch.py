# SPDX-License-Identifier: Apache-2.0
"""The rules on machines, ports and GPUs say what accelerate's launcher does."""

import pytest
import yaml
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env

from accelerate_judge import launched, write
from broken_configs import DDP, FULL1, FULL2, MESH, ZERO2
from components import config_rules
from components.config_findings import COSTS

pytestmark = pytest.mark.usefixtures("pretended_gpu")
TWO_MACHINES = "num_machines: 2\nmain_process_ip: a\nmachine_rank: 1\n"
ON_CPUS = DDP.replace("MULTI_GPU", "MULTI_CPU")


def kinds_of_findings(text):
    """{key: kind} of the findings on a config."""
    findings, _ = config_rules.check(yaml.safe_load(text))
    return {item.path[-1]: item.kind for item in findings}


@pytest.mark.parametrize(
    "text",
    [DDP, FULL2, FULL1, ZERO2 + "  deepspeed_multinode_launcher: standard\n"],
    ids=["DDP", "FSDP2", "FSDP1", "DeepSpeed"],
)
def test_on_several_machines_the_launcher_has_a_port(text):
    assert "num_machines" not in kinds_of_findings(text + TWO_MACHINES)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (FULL2 + MESH + "2\n", "set parallelism_config_dp_replicate_size to 4"),
        (FULL2 + MESH + "3\n", "set parallelism_config_dp_shard_size to 4"),
        (FULL2 + MESH + "5\n", "set parallelism_config_dp_shard_size to 4"),
        (FULL2.replace("8", "7") + MESH + "3\n", "launch 6 processes"),
    ],
)
def test_a_mesh_of_another_size_is_told_which_key_to_change(text, fix):
    findings, _ = config_rules.check(yaml.safe_load(text))
    (found,) = [item for item in findings if item.path == ("parallelism_config",)]
    assert found.fix == fix


def test_the_port_is_29500(tmp_path):
    path = write(tmp_path, DDP + TWO_MACHINES)
    args = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    args, *_ = _validate_launch_command(args)
    prepare_multi_gpu_env(args)
    assert args.rdzv_endpoint == "a:29500"


def test_the_launcher_of_cpus_asks_for_the_port():
    assert kinds_of_findings(ON_CPUS + TWO_MACHINES)["num_machines"] == COSTS


def test_the_launcher_asks_for_gpus_where_the_rules_say_so(tmp_path):
    one_gpu = "gpu_ids: '0'\n"
    assert "gpu_ids" not in kinds_of_findings(ON_CPUS + one_gpu)
    assert not launched(tmp_path, ON_CPUS + one_gpu).args.multi_gpu
    one_on_each = DDP.replace("8", "2") + TWO_MACHINES + one_gpu
    assert "gpu_ids" not in kinds_of_findings(one_on_each)
    with pytest.raises(ValueError, match="at least two"):
        launched(tmp_path, DDP + one_gpu)
