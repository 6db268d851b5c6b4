# SPDX-License-Identifier: Apache-2.0
"""Options for speed do not change what is learned, even if it is sharded, and nothing waits."""

import json
import os
import sys

import pytest

from components.checkpoint import read_state
from launching import RECIPE, REPO, data_of, read_metrics, run
from proof.compare import bounds_of, compare, within
from proof.jobs import CUT, LEVERS, MODEL, PACKING, Run, all_runs, reference_of
from proof.launch import launch
from proof.parity_table import measure
from short_jobs import short


@pytest.mark.parametrize("config", ["fsdp2_full_shard", "deepspeed_zero3"])
def test_padding_free_batches_and_losses_in_pieces_are_those_of_plain_ones(
    config, short_of, short_in_one_process, tmp_path
):
    planned = short(Run("levers", config, 2, *CUT[2], flags=LEVERS))
    row = measure(planned, short_of("llama"), tmp_path / "run", short_in_one_process("full"))
    assert row["verdict"] == "ok", row


def test_packed_lines_give_the_same_on_ranks(tiny, tmp_path):
    planned = Run("packing", "fsdp1_full_shard", 2, *CUT[2], flags=PACKING)
    reference = reference_of(planned)
    assert planned in all_runs() and reference in all_runs()
    launch(reference, tiny, tmp_path / "reference")
    row = measure(planned, tiny, tmp_path / "run", tmp_path / "reference")
    assert row["verdict"] == "ok", row
    packing = json.loads((tmp_path / "run" / "run.json").read_text())["summary"]["packing"]
    assert packing.startswith("210 rows in ") and int(packing.split()[3]) < 110


@pytest.fixture
def tied(tmp_path):
    """The tiny model with one matrix for embedding and output."""
    script, folder = REPO / "scripts" / "make_tiny.py", tmp_path / "tied"
    done = run(sys.executable, script, "llama", folder, *MODEL, "--tie_word_embeddings")
    assert done.returncode == 0, done.output
    return folder


def test_a_tied_head_in_pieces_is_gathered_right(tied, tmp_path):
    for config, ranks in (("single", 1), ("fsdp2_full_shard", 2), ("deepspeed_zero3", 2)):
        planned = Run("levers", config, ranks, *CUT[ranks], flags=LEVERS)
        code, output = launch(planned, tied, tmp_path / config)
        assert code == 0, output[-3000:]
        found = compare(tmp_path / config, tmp_path / "single")
        assert within(found, bounds_of(planned)[0]), (config, found)


def test_compiled_layers_train_alike_and_are_saved_under_their_own_names(tiny, tmp_path):
    flags = (*PACKING, "--max_steps", "6")
    plain = Run("packing", "single", flags=flags)
    compiled = Run(
        "packing", "ddp", 2, *CUT[2], flags=(*flags, "--torch_compile", "--save_steps", "3")
    )
    for planned, folder in ((plain, tmp_path / "plain"), (compiled, tmp_path / "compiled")):
        code, output = launch(planned, tiny, folder)
        assert code == 0, output[-3000:]
    assert "torch.compile of each kind of layer" in output
    found = compare(
        tmp_path / "compiled", tmp_path / "plain"
    )  # compares the names of all tensors too
    assert found["loss"] < 1e-5 and found["weights"] < 1e-4, found
    names = read_state(tmp_path / "compiled" / "checkpoint-6")
    assert not [name for name in names if "_orig_mod" in name or "module." in name]


def test_a_step_that_does_not_log_waits_for_nothing(tiny, tmp_path):
    flags = "--max_steps 12 --logging_steps 5 --gradient_accumulation_steps 2 "
    flags += "--eval_strategy no --save_steps 0"
    words = [*data_of(tiny), *flags.split(), "--output_dir", tmp_path / "run"]
    program = REPO / "tests" / "count_syncs.py"
    done = run(sys.executable, program, tmp_path / "syncs.json", RECIPE, *words)
    assert done.returncode == 0, done.output[-3000:]
    found = json.loads((tmp_path / "syncs.json").read_text())
    steps = {step: [read for read in found if read["step"] == step] for step in range(1, 13)}
    assert len(steps[5]) > len(steps[4])  # those that log do wait: the probe sees it
    for step in set(steps) - {1, 5, 10, 12}:  # in the first the loader of data draws its seed
        # transformers asks once per forward pass whether sequences are packed (masking_utils.py);
        # nothing else may wait
        others = [read for read in steps[step] if read["file"] != "transformers/masking_utils.py"]
        assert others == [] and len(steps[step]) <= 2, steps[step]
    assert len(read_metrics(tmp_path / "run")[0]) == 3


def test_gradients_under_ddp_lie_in_its_buckets(tiny, tmp_path):
    flags = [
        "--max_steps",
        3,
        "--gradient_accumulation_steps",
        2,
        "--eval_strategy",
        "no",
        "--save_steps",
        0,
        "--output_dir",
        tmp_path / "run",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        2,
        REPO / "tests" / "count_gradients.py",
        tmp_path / "gradients.json",
        RECIPE,
        *data_of(tiny),
    ]
    done = run(*command, *flags, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.output[-3000:]
    steps = json.loads((tmp_path / "gradients.json").read_text())
    assert len(steps) == 3 and all(0 < step["storages"] < step["gradients"] for step in steps), (
        steps
    )
