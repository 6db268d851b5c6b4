# SPDX-License-Identifier: Apache-2.0
"""Every broken config is found, and its key, the reason and the fix are named.

accelerate's launcher and plugins are the judges wherever a rule claims that a key is ignored or
that accelerate stops.
"""

import pytest

from accelerate_judge import deepspeed_run, fsdp_run, launched, write
from broken_configs import (
    BROKEN,
    DDP,
    FSDP2,
    FULL1,
    FULL2,
    ZERO3,
)
from components.config_files import find_faults, load
from components.config_findings import Finding

pytestmark = pytest.mark.usefixtures("pretended_gpu")
# Requirements of the recipes, and how severe the same finding is in other people's files
WISHES = {
    "accumulation in the file": "info",
    "ZeRO-3 that cannot save": "warning",
    "FSDP1 with flat parameters": "info",
    "tensor parallel mesh": "info",
    "tensor parallel shards that rank 0 would load": "info",
}


def findings_on(folder, text, for_recipes=False) -> list[Finding]:
    findings, _ = find_faults(load(write(folder, text)), for_recipes=for_recipes)
    return findings


@pytest.mark.parametrize("name", BROKEN)
def test_a_fault_is_found_with_its_key_its_reason_and_the_way_out(name, tmp_path):
    case = BROKEN[name]
    file = load(write(tmp_path, case.text))
    findings, _ = find_faults(file, for_recipes=True)
    found = [item for item in findings if item.path[-1] == case.key]
    assert case.severity in [item.severity for item in found]
    assert any(case.words in f"{item.reason}; {item.fix}" for item in found), found
    assert all(item.fix for item in found if item.severity != "info")
    assert file.line_of(found[0].path) or "missing" in found[0].reason


@pytest.mark.parametrize("name", BROKEN)
def test_a_wish_of_the_recipes_is_no_fault_of_somebody_elses_file(name, tmp_path):
    case = BROKEN[name]
    findings = findings_on(tmp_path, case.text)
    found = {item.severity for item in findings if item.path[-1] == case.key}
    assert WISHES.get(name, case.severity) in found
    assert name not in WISHES or "error" not in found


def test_there_are_enough_broken_files():
    assert len(BROKEN) >= 25
    fixed = sum(case.fixed is not None for case in BROKEN.values())
    print(f"{len(BROKEN)} broken files, {fixed} are fixed")


def test_what_the_recipes_are_not_tested_with_is_a_warning_for_them_only(tmp_path):
    fp8 = DDP.replace("bf16", "fp8") + "fp8_config: {fp8_backend: TE}\n"
    one_on_cpus = DDP.replace("MULTI_GPU", "MULTI_CPU").replace("8", "1")
    for text in (one_on_cpus, fp8):
        by_itself = findings_on(tmp_path, text)
        with_recipes = findings_on(tmp_path, text, for_recipes=True)
        assert [item.severity for item in by_itself] == ["info"]
        assert [item.severity for item in with_recipes] == ["warning"]


def test_tensor_and_context_parallelism_together_are_an_error_for_the_recipes_only(tmp_path):
    sizes = {f"parallelism_config_{kind}_size": 2 for kind in ("dp_shard", "cp", "tp")}
    text = f"{FULL2}  fsdp_cpu_ram_efficient_loading: false\nparallelism_config: {sizes}\n"
    for for_recipes, severity in ((False, "info"), (True, "error")):
        found = findings_on(tmp_path, text, for_recipes=for_recipes)
        told = {item.path[-1]: item.severity for item in found}
        assert told["parallelism_config_cp_size"] == severity


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
