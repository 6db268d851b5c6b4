# SPDX-License-Identifier: Apache-2.0
"""scripts/merge.py joins a checkpoint; that it merges adapters is in test_merging.py."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launching import data_of, rehearse, script


def test_a_checkpoint_becomes_the_folder_that_its_run_ends_with(tiny, tmp_path):
    out = tmp_path / "run"
    words = ["--max_steps", 2, "--save_steps", 2, "--eval_strategy", "no", "--output_dir", out]
    done = rehearse("fsdp2_full_shard", *data_of(tiny), *words)
    assert done.returncode == 0, done.output[-3000:]
    joined = tmp_path / "joined"
    script("merge", out / "checkpoint-2", joined, code=0)
    weights = load_file(joined / "model.safetensors")
    expected = load_file(out / "model.safetensors")
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    others = {path.name for path in out.glob("*.json*")} - {"run.json", "status.json"}
    for name in others - {"metrics.jsonl", "report.json"}:
        assert (joined / name).read_bytes() == (out / name).read_bytes(), name
    AutoModelForCausalLM.from_pretrained(joined)
