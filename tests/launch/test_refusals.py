# SPDX-License-Identifier: Apache-2.0
"""Settings that accelerate would silently ignore, and those that cannot work, are refused before
the model loads, with a fix."""

import json
import os
import re

import pytest
import yaml

from launching import CONFIGS, RECIPE, accelerate_launch, data_of, recipe, rehearse

SHARDING = ["fsdp1_full_shard", "fsdp2_full_shard", "deepspeed_zero1", "deepspeed_zero3"]


@pytest.mark.parametrize(
    ("config", "num_processes"), [*((config, 1) for config in SHARDING), ("fsdp2_full_shard", 2)]
)
def test_sharding_without_an_accelerator_refuses(config, num_processes, tiny, tmp_path):
    launcher = ["--config_file", CONFIGS / f"{config}.yaml", "--num_processes", num_processes]
    launcher += ["--mixed_precision", "no", "--main_process_port", 0]
    done = accelerate_launch(*launcher, RECIPE, *data_of(tiny), "--output_dir", tmp_path / "run")
    assert done.returncode != 0
    # FSDP1 needs a device at once
    not_started = "error: accelerate cannot run what the launch requests"
    assert (
        not_started in done.output
        or "error: the launcher requested more than accelerate runs" in done.output
    )
    assert "rehearse: python scripts/rehearse.py" in done.output
    what_it_does = f"python scripts/check_config.py {CONFIGS / config}.yaml"
    assert not_started in done.output or what_it_does in done.output
    assert "Loading weights" not in done.output and not (tmp_path / "run").exists()
    assert (
        "run the same command again" not in done.output
    )  # from a rank that the launcher ended for the first one
    if num_processes > 1:  # the launcher's report, which comes last, ends with the reason
        assert (
            "traceback : error: the launcher requested more" in done.output.split("Root Cause")[1]
        )


ASKED_FOR_MORE = (
    "error: the launcher requested more than accelerate runs here, which is one process"
)


@pytest.mark.parametrize(
    ("launcher", "says"),
    [
        (["--config_file", str(CONFIGS / "ddp.yaml"), "--main_process_port", "0"], ASKED_FOR_MORE),
        (
            ["--config_file", str(CONFIGS / "single.yaml")],
            "one process runs, not 2; fix: MULTI_GPU",
        ),
        (["--cpu"], ASKED_FOR_MORE),
        (["--cpu", "--main_process_port", "29511"], ASKED_FOR_MORE),
    ],
    ids=["ddp", "single", "cpu", "cpu with a port"],
)
def test_two_processes_that_become_one_refuse(launcher, says, tiny, tmp_path):
    command = [*launcher, "--num_processes", 2, "--mixed_precision", "no", RECIPE, *data_of(tiny)]
    done = accelerate_launch(*command, "--output_dir", tmp_path / "run")
    assert done.returncode != 0
    assert says in done.output
    assert "Loading weights" not in done.output and not (tmp_path / "run").exists()


def test_offload_without_a_compiler_says_what_to_install(tiny, tmp_path):
    # What the launcher exports for deepspeed_zero2_offload.yaml; no ninja and no compiler on this
    # PATH
    environment = os.environ | {
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "PATH": str(tmp_path),
    }
    done = recipe(*data_of(tiny), "--output_dir", tmp_path / "run", env=environment)
    assert done.returncode == 64
    assert (
        "pip install ninja" in done.output
        and "g++" in done.output
        and "Traceback" not in done.output
    )


@pytest.mark.parametrize(
    ("size", "says"),
    [("TP", "splits neither matrices nor rows"), ("DP_SHARD", "does not shard by a mesh")],
)
def test_meshes_that_nothing_would_shard_over_refuse(size, says, tiny, tmp_path):
    # What the launcher exports for tp_size: 2, whose ranks would each take rows of their own, and
    # for dp_shard_size: 2 with MULTI_GPU, where plain DDP runs
    environment = os.environ | {f"PARALLELISM_CONFIG_{size}_SIZE": "2"}
    done = recipe(*data_of(tiny), "--output_dir", tmp_path / "run", env=environment)
    assert done.returncode == 64 and says in done.output, done.output


@pytest.mark.parametrize(
    ("config", "flags", "says"),
    [
        ("fsdp2_full_shard", ["--optim", "adamw_8bit"], "use adamw_torch_fused"),
        ("deepspeed_zero2", ["--optim", "adamw_8bit"], "use adamw_torch_fused"),
        ("fsdp1_full_shard", ["--use_peft", "--use_dora"], "use an fsdp2 YAML"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_combinations_that_cannot_work_refuse(config, flags, says, tiny, tmp_path):
    done = rehearse(config, *data_of(tiny), "--output_dir", tmp_path / "run", *flags)
    assert done.returncode == 64, done.output[-2000:]
    assert (
        says in done.output
        and "Traceback" not in done.output
        and "Loading weights" not in done.output
    )


ZERO_3_FAULTS = {
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
}
FSDP1_FAULTS = {"fsdp_use_orig_params": False, "fsdp_reshard_after_forward": "NO_SHARD"}


@pytest.mark.parametrize(
    ("config", "section", "changes"),
    [
        ("deepspeed_zero3", "deepspeed_config", ZERO_3_FAULTS),
        ("fsdp1_full_shard", "fsdp_config", FSDP1_FAULTS),
        ("fsdp2_full_shard", "fsdp_config", {"fsdp_sharding_strategy": "NO_SHARD"}),
    ],
    ids=["ZeRO-3", "FSDP1", "FSDP2"],
)
def test_a_changed_file_of_the_launcher_refuses(config, section, changes, tiny, tmp_path):
    path = tmp_path / "changed.yaml"
    content = yaml.safe_load((CONFIGS / f"{config}.yaml").read_text())
    content[section] |= changes
    path.write_text(yaml.safe_dump(content))
    launcher = ["--config_file", path, "--main_process_port", 0]
    done = accelerate_launch(*launcher, RECIPE, *data_of(tiny), "--output_dir", tmp_path / "run")
    assert re.search(r"exit(code +: | status )64\b", done.output), done.output[-2000:]
    for key in changes:
        assert re.search(rf"error: {path}:\d+: {section}\.{key}: ", done.output), done.output
    assert not (tmp_path / "run").exists()


def test_a_misspelt_key_of_the_launchers_file_refuses_before_anything_is_made(tiny, tmp_path):
    # accelerate ignores it without a word: FULL_SHARD would run
    text = (CONFIGS / "fsdp2_shard_grad_op.yaml").read_text()
    (tmp_path / "trap.yaml").write_text(
        text.replace("fsdp_reshard_after_forward", "fsdp_reshard_after_foward")
    )
    launcher = [
        "--config_file",
        tmp_path / "trap.yaml",
        "--num_processes",
        2,
        "--main_process_port",
        0,
    ]
    done = accelerate_launch(
        *launcher, RECIPE, *data_of(tiny), "--output_dir", tmp_path / "run", "--dry_run"
    )
    assert done.returncode != 0 and not (tmp_path / "run").exists(), done.output[-2000:]
    line = 1 + text[: text.index("\n  fsdp_reshard_after_forward:") + 1].count("\n")
    says = "no such key: accelerate ignores it silently; fix: fsdp_reshard_after_forward"
    place = f"{tmp_path / 'trap.yaml'}:{line}: fsdp_config.fsdp_reshard_after_foward"
    assert f"error: {place}: {says}" in done.output
    assert "rehearse" not in done.output  # no Accelerator was made, which would look for a GPU


def test_the_default_file_and_the_json_it_names_are_checked_too(tiny, tmp_path):
    data = {
        "zero_optimization": {"stage": 2},
        "bf16": {"enabled": True},
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_cliping": 1.0,
    }
    (tmp_path / "ds.json").write_text(json.dumps(data))
    zero = {"deepspeed_config_file": str(tmp_path / "ds.json")}
    content = {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": zero}
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(yaml.safe_dump(content))
    done = accelerate_launch(
        RECIPE,
        *data_of(tiny),
        "--output_dir",
        tmp_path / "run",
        env=os.environ | {"HF_HOME": str(tmp_path)},
    )
    assert done.returncode != 0 and not (tmp_path / "run").exists(), done.output[-2000:]
    assert (
        f"error: {tmp_path / 'ds.json'}:1: gradient_cliping: no such key: DeepSpeed ignores it "
        "silently" in done.output
    )


@pytest.mark.parametrize("config", ["fsdp", "fsdp1_full_shard", "deepspeed_zero3"])
def test_4_bit_weights_that_mixed_precision_would_cast_refuse(config, tiny, tmp_path):
    # float32 storage (the default --dtype) under the YAML's bf16: a cast would change the packed
    # bits
    flags = ["--use_peft", "--load_in_4bit", "--output_dir", tmp_path / "run"]
    done = rehearse(config, *data_of(tiny), *flags, mixed_precision="bf16")
    assert done.returncode == 64, done.output[-2000:]
    assert "use --dtype bfloat16" in done.output


@pytest.mark.parametrize(
    "address", [{"MASTER_ADDR": "node1"}, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}]
)
def test_a_cluster_that_exports_its_address_does_not_refuse(address, tiny, tmp_path):
    launcher = ["--config_file", CONFIGS / "single.yaml", "--mixed_precision", "no"]
    command = [
        *launcher,
        RECIPE,
        *data_of(tiny),
        "--max_steps",
        1,
        "--output_dir",
        tmp_path / "run",
    ]
    done = accelerate_launch(*command, env=os.environ | address)
    assert done.returncode == 0, done.output[-2000:]
