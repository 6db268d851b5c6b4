# SPDX-License-Identifier: Apache-2.0
"""The rules on meshes say what accelerate does with them, whoever's script runs."""

from argparse import Namespace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import yaml
from accelerate import Accelerator
from accelerate.parallelism_config import ParallelismConfig
from accelerate.utils import DistributedType

from accelerate_judge import launched, outcome
from broken_configs import DDP, FSDP2, FULL2, MESH_OF, ZERO2
from components import config_rules
from components.config_findings import IGNORED, STOPS, UPSTREAM
from components.config_names import NAMES_OF_MESH, OUTSIDE_OF_MESH

pytestmark = pytest.mark.usefixtures("pretended_gpu")
FSDP2_ON_4 = FULL2.replace("8", "4") + "  fsdp_cpu_ram_efficient_loading: false\n"
SECTION = "parallelism_config:\n"


def findings_on(text, for_recipes=False):
    findings, _ = config_rules.check(yaml.safe_load(text), for_recipes=for_recipes)
    return {item.path[-1]: item for item in findings if item.severity != "info"}


# ---- Sizes that cannot be read ----
@pytest.mark.parametrize("value", ["null", "", "~", "auto", "2.0", "'${TP}'", "[2]", "true"])
@pytest.mark.parametrize("kind", ["dp_shard", "cp", "tp"])
def test_a_size_that_cannot_be_read_is_the_only_finding(value, kind, tmp_path):
    sizes = {"dp_shard": 2, "cp": 1, "tp": 2} | {kind: value}
    lines = [f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items()]
    text = FSDP2_ON_4 + SECTION + "".join(lines)
    assert {name: item.kind for name, item in findings_on(text).items()} == {
        f"parallelism_config_{kind}_size": STOPS
    }
    assert outcome(tmp_path, text).stopped


# ---- Engines ----
def test_without_deepspeed_sequence_parallelism_is_ignored_and_its_size_fits_any_processes(
    tmp_path,
):
    for start in (DDP, FSDP2_ON_4):
        shards = "  parallelism_config_dp_shard_size: 2\n" if start is FSDP2_ON_4 else ""
        text = start + SECTION + shards + "  parallelism_config_sp_size: 2\n"
        text = text.replace("num_processes: 4", "num_processes: 6")
        assert not outcome(tmp_path, text).stopped
        assert [item.kind for item in findings_on(text).values()] == [IGNORED]


def test_megatron_takes_no_mesh():
    text = DDP.replace("MULTI_GPU", "MEGATRON_LM") + SECTION
    text += "  parallelism_config_dp_shard_size: 8\n"
    assert findings_on(text)["parallelism_config"].kind == STOPS
    accelerator = Namespace(
        multi_device=False,
        num_processes=8,
        is_fsdp2=False,
        distributed_type=DistributedType.MEGATRON_LM,
    )
    with pytest.raises(ValueError, match="only compatible"):
        ParallelismConfig(dp_shard_size=8)._validate_accelerator(accelerator)


def test_tensor_parallelism_under_fsdp2_is_an_error_for_all_scripts_but_the_recipes():
    text = FSDP2_ON_4 + MESH_OF.format(first="dp_shard", second="tp")
    found = findings_on(text)
    assert {name: item.kind for name, item in found.items()} == {
        "parallelism_config_tp_size": UPSTREAM
    }
    assert "parallelism_config_dp_shard_size: 4" in found["parallelism_config_tp_size"].fix
    assert not findings_on(text, for_recipes=True)
    mended = FSDP2_ON_4 + SECTION + "  parallelism_config_dp_shard_size: 4\n"
    assert not findings_on(mended)


def test_accelerate_leaves_a_model_whole_that_is_not_split():
    model = torch.nn.Linear(2, 2)
    accelerator = SimpleNamespace(_prepare_one=lambda item, **settings: item)
    with mock.patch("accelerate.accelerator.logger") as logger:
        assert Accelerator._prepare_tp(accelerator, model) == [model]
    assert "not sharded by DTensor" in str(logger.warning.call_args)


def test_tensor_parallel_groups_without_fsdp_are_told_that_nothing_joins_them():
    text = DDP.replace("8", "4") + MESH_OF.format(first="dp_shard", second="tp")
    (item,) = findings_on(text).values()
    assert item.kind == IGNORED
    assert "averages the gradients of the 2 groups" in item.reason
    assert item.fix.startswith("1, with num_processes: 2")
    one_group = DDP.replace("8", "2") + SECTION + "  parallelism_config_tp_size: 2\n"
    assert not findings_on(one_group)


# ---- Names elsewhere ----
@pytest.mark.parametrize("name", NAMES_OF_MESH)
def test_the_name_of_a_size_elsewhere_comes_with_that_of_accelerate(name, tmp_path):
    right = NAMES_OF_MESH[name]
    for prefix in ("", "parallelism_config_"):
        key = prefix + name
        if key == right:
            continue
        text = FSDP2 + SECTION + f"  {key}: 2\n"
        assert getattr(launched(tmp_path, text).args, right) == 1  # it is ignored
        item = findings_on(text)[key]
        assert (item.kind, item.fix) == (IGNORED, right)


@pytest.mark.parametrize(
    ("text", "key", "fix"),
    [
        (DDP + "tensor_parallel_degree: 2\n", "tensor_parallel_degree", "_tp_size: 2 in parall"),
        (FSDP2 + "  cp_size: 2\n", "cp_size", "parallelism_config_cp_size there, beside"),
        (
            FSDP2 + f"  cp_size: 2\n{SECTION}  parallelism_config_dp_shard_size: 4\n",
            "cp_size",
            "parallelism_config_cp_size: 2 in parallelism_config, not here",
        ),
        (FSDP2 + "parallelism:\n  tp_size: 2\n", "parallelism", "parallelism_config"),
        (
            FSDP2 + SECTION + "  data_parallel_shard_degree: -1\n",
            "data_parallel_shard_degree",
            "parallelism_config_dp_shard_size: num_processes divided by the other sizes",
        ),
    ],
)
def test_a_size_in_another_place_comes_with_its_own(text, key, fix):
    assert fix in findings_on(text)[key].fix


@pytest.mark.parametrize("name", OUTSIDE_OF_MESH)
def test_a_size_that_no_mesh_has_comes_with_the_flag_of_the_recipe(name):
    flag = (
        "--pp_size of recipes/llama_pipeline.py"
        if name.startswith("p")
        else "--ep_size of recipes/mixtral.py"
    )
    for text in (FSDP2 + SECTION + f"  {name}: 2\n", DDP + f"{name}: 2\n"):
        item = findings_on(text)[name]
        assert item.reason.endswith(f"the recipes take it as {flag}")
        assert item.fix == f"delete {name}"


def test_the_sizes_of_megatron_have_names_of_their_own():
    text = DDP.replace("MULTI_GPU", "MEGATRON_LM") + "megatron_lm_config:\n  pp_degree: 2\n"
    assert findings_on(text)["pp_degree"].fix == "megatron_lm_pp_degree"


def test_a_deepspeed_mesh_needs_a_place_for_each_process():
    text = ZERO2 + SECTION + "  parallelism_config_sp_size: 3\n"
    assert findings_on(text)["parallelism_config"].kind == STOPS
