# SPDX-License-Identifier: Apache-2.0
"""scripts/plan_memory.py as a user calls it: a launch command with another first word; a trace."""

import json
import sys

import pytest

from launching import run


@pytest.mark.parametrize(
    ("config", "flags", "ranks", "method"),
    [
        ("fsdp", ["--use_peft"], 4, "closed form"),
        # What the closed form does not know is traced
        ("single", ["--use_peft", "--use_dora", "--simulate"], 1, "traced"),
    ],
)
def test_a_launch_command_becomes_its_plan(config, flags, ranks, method, net_tiny, tmp_path):
    launch = ["--config_file", f"accelerate_configs/{config}.yaml", "--num_processes", ranks]
    launch += ["recipes/llama.py", "--model_name_or_path", net_tiny("llama") / "model"]
    launch += ["--output_dir", tmp_path / "run", "--max_length", 64, *flags]
    wishes = ["--gpu", "24GB", "--json", tmp_path / "plan.json", "--plot", tmp_path / "plan.png"]
    done = run(sys.executable, "scripts/plan_memory.py", *launch, *wishes)
    assert done.returncode == 0 and "fits" in done.output, done.output
    report = json.loads((tmp_path / "plan.json").read_text())
    assert report["peak"] == sum(report["device"].values()) <= report["card"] == 24 * 10**9
    assert report["method"] == method
    assert (tmp_path / "plan.png").stat().st_size > 20_000
    assert not (tmp_path / "run").exists()
