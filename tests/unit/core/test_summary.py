# SPDX-License-Identifier: Apache-2.0
"""run.json says all that a run was."""

import json

import torch

from core.summary import write_run_json
from example_arguments import language_model_arguments


def test_run_json_has_all_that_a_run_is(tmp_path):
    args = language_model_arguments("--output_dir", str(tmp_path), "--seed", "7")
    write_run_json(args, {"sample": "one [[row]]"}, {"rows_per_step": 8, "data": "abc"})
    run = json.loads((tmp_path / "run.json").read_text())
    assert run["data"] == "abc" and run["summary"] == {"sample": "one [[row]]"}
    assert run["loss_unit"] == "nats per token" and run["arguments"]["seed"] == 7
    assert run["versions"]["torch"] == torch.__version__
