# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py as a user calls it: a launch command with another first word; a trace."""

import json
import sys

import pytest

from launching import run


@pytest.mark.parametrize(
    ("config", "ranks", "flags", "method"),
    [
        ("fsdp", 4, ["--use_peft", "--gpu", "24GB", "--plot", "plan.png"], "closed form"),
        # What the closed form does not know is traced
        ("single", 1, ["--use_peft", "--use_dora", "--simulate"], "traced"),
    ],
)
def test_a_launch_command_becomes_its_plan(config, ranks, flags, method, net_tiny, tmp_path):
    launch = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", ranks]
    launch += ["recipes/llama.py", "--model_name_or_path", net_tiny("llama") / "model"]
    launch += ["--output_dir", tmp_path / "run", "--max_length", 64]
    wishes = [str(tmp_path / flag) if flag == "plan.png" else flag for flag in flags]
    wishes += ["--json", tmp_path / "plan.json"]
    done = run(sys.executable, "scripts/plan_memory.py", *launch, *wishes)
    assert done.returncode == 0, done.output
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["peak"] == sum(report["device"].values())
    assert report["method"] == method
    assert not (tmp_path / "run").exists()
    if "--plot" in flags:
        assert "fits" in done.output and (tmp_path / "plan.png").stat().st_size > 20_000
