# SPDX-License-Identifier: Apache-2.0
"""Nothing waits for the GPU in a step that does not log, and gradients are not copied.

That options for speed do not change what is learned is shown in test_cells.py.
"""

import json
import os
import sys

from launching import RECIPE, REPO, read_metrics, run
from net import data_of

SHORT = ["--gradient_accumulation_steps", 2, "--eval_strategy", "no", "--save_steps", 0]


def test_a_step_that_does_not_log_waits_for_nothing(tiny, tmp_path):
    flags = [*SHORT, "--max_steps", 12, "--logging_steps", 5, "--output_dir", tmp_path / "run"]
    program = [sys.executable, REPO / "tests" / "count_syncs.py", tmp_path / "syncs.json"]
    done = run(*program, RECIPE, *data_of(tiny), *flags)
    assert done.returncode == 0, done.output[-3000:]
    found = json.loads((tmp_path / "syncs.json").read_text())
    steps = {step: [read for read in found if read["step"] == step] for step in range(1, 13)}
    # Those that log do wait, at their end, when they are counted: the probe sees it
    assert len(steps[6]) > len(steps[4])
    for step in set(steps) - {1, 6, 11}:  # In the first the loader of data draws its seed
        # transformers asks once per forward pass whether sequences are packed (masking_utils.py);
        # nothing else may wait
        others = [read for read in steps[step] if read["file"] != "transformers/masking_utils.py"]
        assert others == [] and len(steps[step]) <= 2, steps[step]
    assert len(read_metrics(tmp_path / "run")[0]) == 3


def test_gradients_under_ddp_lie_in_its_buckets(tiny, tmp_path):
    program = [REPO / "tests" / "count_gradients.py", tmp_path / "gradients.json", RECIPE]
    flags = [*SHORT, "--max_steps", 3, "--output_dir", tmp_path / "run"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = ["--nproc_per_node", 2, *program, *data_of(tiny), *flags]
    done = run(*launcher, *words, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.output[-3000:]
    steps = json.loads((tmp_path / "gradients.json").read_text())
    assert len(steps) == 3
    assert all(0 < step["storages"] < step["gradients"] for step in steps), steps
