# SPDX-License-Identifier: Apache-2.0
"""Nothing waits for the GPU in a step that does not log, and TF32 is only where it is asked for.

That options for speed do not change what is learned is shown in test_cells.py.
"""

import re
import sys

import pytest
import torch

import vit
from core.cli import parse
from core.engine import set_up_engine
from count_syncs import PEAK
from fakes import fake_accelerator
from launching import RECIPE, REPO, read_json, read_metrics, run
from net import data_of


def test_a_step_that_does_not_log_waits_for_nothing(tiny, tmp_path):
    flags = ["--gradient_accumulation_steps", 2, "--eval_strategy", "no", "--save_steps", 0]
    flags += ["--max_steps", 12, "--logging_steps", 5, "--output_dir", tmp_path / "run"]
    program = [sys.executable, REPO / "tests" / "count_syncs.py", tmp_path / "syncs.json"]
    done = run(*program, RECIPE, *data_of(tiny), *flags, code=0)
    found = read_json(tmp_path / "syncs.json")
    steps = {step: [read for read in found if read["step"] == step] for step in range(1, 13)}
    # Those that log do wait, at their end, when they are counted: the probe sees it
    assert len(steps[6]) > len(steps[4])
    for step in set(steps) - {1, 6, 11}:  # In the first the loader of data draws its seed
        # transformers asks once per forward pass whether sequences are packed (masking_utils.py);
        # nothing else may wait
        others = [read for read in steps[step] if read["file"] != "transformers/masking_utils.py"]
        assert others == [] and len(steps[step]) <= 2, steps[step]
    lines = read_metrics(tmp_path / "run")[0]
    assert len(lines) == 3
    # And the share of the peak is there where the peak is known
    of_a_token = float(re.search(r"a token takes (\S+) FLOPs", done.output)[1])
    for line in lines:
        expected = line["tokens_per_second"] * of_a_token / PEAK
        assert line["mfu"] == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("flags", [[], ["--tf32"]], ids=lambda flags: " ".join(flags) or "none")
def test_convolutions_are_in_tf32_only_where_asked(flags, monkeypatch):
    """torch's default lets cuDNN round to TF32, such as vit.py's of patches."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", not flags)
    precision = torch.get_float32_matmul_precision()
    try:
        set_up_engine(parse(vit.Arguments, words=flags), fake_accelerator())
        assert torch.backends.cudnn.allow_tf32 == bool(flags)
        assert torch.get_float32_matmul_precision() == ("high" if flags else "highest")
    finally:
        torch.set_float32_matmul_precision(precision)
