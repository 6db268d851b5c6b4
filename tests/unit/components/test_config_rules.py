# SPDX-License-Identifier: Apache-2.0
"""accelerate's launcher and plugins are the judges of the rules on configs.

Wherever a rule claims that a key is ignored or that accelerate stops, accelerate is asked. What the
rules find in each broken and each shipped file is in tests/golden/configs.json.
"""

import pytest
import yaml

from accelerate_judge import deepspeed_run, fsdp_run, launched, outcome, write
from broken_configs import DDP, FSDP1, FSDP2, FULL1, FULL2, ZERO3
from components import config_rules
from components.config_files import find_faults, load
from components.config_findings import IGNORED, STOPS
from components.config_names import NAMES_OF_MESH
from components.config_reading import as_read
from components.config_strategy import shards_of, strategy_of

pytestmark = pytest.mark.usefixtures("pretended_gpu")
SECTION = "parallelism_config:\n"
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


def kinds_of(text):
    """{key: kind} of what is found in a config, but for what is only said."""
    findings, _ = config_rules.check(yaml.safe_load(text))
    return {item.path[-1]: item.kind for item in findings if item.severity != "info"}


def test_what_the_recipes_are_not_tested_with_is_a_warning_for_them_only(tmp_path):
    fp8 = DDP.replace("bf16", "fp8") + "fp8_config: {fp8_backend: TE}\n"
    one_on_cpus = DDP.replace("MULTI_GPU", "MULTI_CPU").replace("8", "1")
    for text in (one_on_cpus, fp8):
        for for_recipes, severity in ((False, "info"), (True, "warning")):
            found, _ = find_faults(load(write(tmp_path, text)), for_recipes=for_recipes)
            assert [item.severity for item in found] == [severity]


def test_accelerate_stops_or_goes_astray_where_the_rules_say_so(tmp_path):
    nvme = ZERO3 + "  offload_param_device: nvme\n  offload_param_nvme_path: /fast\n"
    lost = deepspeed_run(tmp_path, nvme)
    assert lost["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "none"}
    with pytest.raises(AttributeError):
        launched(tmp_path, DDP.replace("bf16", "no"))  # a bare no
    with pytest.raises(AttributeError):
        launched(tmp_path, DDP + "gpu_ids: 0\n")
    with pytest.raises(ValueError, match="fsdp_sync_module_states"):
        launched(tmp_path, FULL2 + "  fsdp_sync_module_states: false\n")
    with pytest.raises(ValueError, match="invalid truth value"):
        fsdp_run(tmp_path, FSDP2 + "  fsdp_reshard_after_forward: SHARD_GRAD_OP\n")
    layers = fsdp_run(tmp_path, FULL1 + "  fsdp_transformer_layer_cls_to_wrap: [Block]\n")
    assert layers["transformer_cls_names_to_wrap"] == """["['Block']"]"""


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


def test_sizes_of_1_are_no_mesh_and_fsdp2_shards_over_all_processes(tmp_path):
    kinds = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    sizes = "".join(f"  parallelism_config_{kind}_size: 1\n" for kind in kinds)
    text = FULL2 + "parallelism_config:\n" + sizes
    content = yaml.safe_load(text)
    findings, _ = config_rules.check(content)
    assert not outcome(tmp_path, text).stopped and not findings
    shards = shards_of(strategy_of(as_read(content)), processes=8, processes_per_node=8)
    assert set(shards.values()) == {8}


def test_the_launcher_asks_for_gpus_where_the_rules_say_so(tmp_path):
    one_gpu = "gpu_ids: '0'\n"
    on_cpus = DDP.replace("MULTI_GPU", "MULTI_CPU") + one_gpu
    two_machines = "num_machines: 2\nmain_process_ip: a\nmachine_rank: 1\n"
    assert "gpu_ids" not in kinds_of(on_cpus)
    assert not launched(tmp_path, on_cpus).args.multi_gpu
    one_on_each = DDP.replace("8", "2") + two_machines + one_gpu
    assert "gpu_ids" not in kinds_of(one_on_each)
    with pytest.raises(ValueError, match="at least two"):
        launched(tmp_path, DDP + one_gpu)


# ---- Meshes ----
FSDP2_ON_4 = FULL2.replace("8", "4") + "  fsdp_cpu_ram_efficient_loading: false\n"


@pytest.mark.parametrize("value", ["null", "auto", "2.0", "'${TP}'", "[2]", "true"])
@pytest.mark.parametrize("kind", ["dp_shard", "tp"])
def test_a_size_that_cannot_be_read_is_the_only_finding(value, kind, tmp_path):
    sizes = {"dp_shard": 2, "cp": 1, "tp": 2} | {kind: value}
    lines = [f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items()]
    text = FSDP2_ON_4 + SECTION + "".join(lines)
    assert kinds_of(text) == {f"parallelism_config_{kind}_size": STOPS}
    assert outcome(tmp_path, text).stopped


def test_without_deepspeed_sequence_parallelism_is_ignored(tmp_path):
    for start in (DDP, FSDP2_ON_4 + SECTION + "  parallelism_config_dp_shard_size: 2\n"):
        section = "" if SECTION in start else SECTION
        text = f"{start}{section}  parallelism_config_sp_size: 2\n"
        text = text.replace("num_processes: 4", "num_processes: 6")
        assert not outcome(tmp_path, text).stopped
        assert list(kinds_of(text).values()) == [IGNORED]


def test_the_name_of_a_size_elsewhere_is_ignored(tmp_path):
    for name, right in NAMES_OF_MESH.items():
        for key in {name, f"parallelism_config_{name}"} - {right}:
            text = FSDP2 + SECTION + f"  {key}: 2\n"
            assert getattr(launched(tmp_path, text).args, right) == 1
            assert kinds_of(text)[key] == IGNORED
