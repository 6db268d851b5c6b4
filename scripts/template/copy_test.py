#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Whether this copy trains, stops, continues to the same bits, and refuses a wrong flag.

    python test_copy.py [FLAGS OF THE RECIPE]       # or pytest; a minute on a CPU

It trains the tiny model in tiny/ whole, and again with a stop in the middle. Run it after an edit:
the weights of the two have to be the same to the last bit.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
RECIPE = HERE / "llama.py"
STEPS = 6
# Runs the recipe, and asks it to stop in its third step, as a batch system would
STOP = """
import os, runpy, signal, sys
from torch.optim.optimizer import register_optimizer_step_post_hook
steps = []
def stop(*_):
    steps.append(1)
    if len(steps) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
register_optimizer_step_post_hook(stop)
sys.argv = sys.argv[1:]
sys.path[0] = os.path.dirname(sys.argv[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def train(folder: Path, *flags: str, stops: bool = False) -> int:
    """Train into a folder; return the exit code."""
    words = [sys.executable]
    if stops:
        words += ["-c", STOP]
    words += [str(RECIPE), "--model_name_or_path", str(HERE / "tiny" / "model")]
    for flag, split in (("--dataset_name", "train"), ("--eval_dataset_name", "test")):
        rows = HERE / "tiny" / "data" / f"{split}.jsonl"
        words += [flag, str(rows if rows.exists() else rows.with_suffix(""))]
    teacher = HERE / "tiny" / "teacher"
    if teacher.exists():
        words += ["--teacher_model_name_or_path", str(teacher)]
    words += ["--output_dir", str(folder), "--max_steps", str(STEPS), "--save_steps", "2"]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if __name__ == "__main__":
        words += sys.argv[1:]
    done = subprocess.run(
        [*words, *flags], env=environment, cwd=HERE, capture_output=True, text=True
    )
    if done.returncode not in (0, 64, 75):
        sys.stderr.write(done.stdout + done.stderr)
    return done.returncode


def test_a_run_that_was_stopped_ends_as_one_that_was_not() -> None:
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder, "whole")
        stopped = Path(folder, "stopped")
        assert train(whole) == 0
        assert train(stopped, stops=True) == 75, "a signal did not stop the run"
        assert train(stopped) == 0
        results = sorted(whole.glob("*.safetensors"))
        assert results, "the run has left no model"
        for path in results:
            assert path.read_bytes() == (stopped / path.name).read_bytes(), path.name


def test_a_wrong_flag_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert train(Path(folder, "run"), "--learning_rat", "1") == 64


if __name__ == "__main__":
    test_a_wrong_flag_is_refused()
    test_a_run_that_was_stopped_ends_as_one_that_was_not()
    print("ok: it trains, stops and continues to the same bits, and refuses a wrong flag")
