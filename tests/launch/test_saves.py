# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds is the state of its step, however late it is written."""

import json
import sys
from hashlib import sha256

import pytest

import net
from net import Cell

# Evaluations in the same steps, since the best model is saved too
SAVES = "--save_steps 3 --eval_steps 3 --save_total_limit 9".split()


# One of each way in which a share is gathered
@pytest.mark.parametrize(
    "cell",
    [
        Cell(),
        Cell("ddp", ranks=2),
        Cell("fsdp1_full_shard", ranks=2),
        Cell("fsdp2_full_shard", ranks=2),
        Cell("deepspeed_zero2", ranks=2),
        Cell("deepspeed_zero3", ranks=3),
    ],
    ids=lambda cell: cell.config,
)
def test_steps_beside_a_save_change_no_bit_of_it(cell, net_tiny, tmp_path):
    """Each rank writes its share of step 3 only when two further steps have changed the weights."""
    tiny = net_tiny("llama")
    whole = net.launch(cell, tiny, tmp_path / "whole", *SAVES).expect(0)
    _, accumulation = net.CUT[cell.ranks]
    late = {"at": "write 1", "do": "wait", "size": 5 * accumulation + 1}
    done = net.launch(cell, tiny, tmp_path / "run", *SAVES, "--async_save", inject=late).expect(0)
    assert "waits for forward pass" in done.output
    assert states_of(done.folder) == states_of(whole.folder)
    assert net.figures(done.folder) == net.figures(whole.folder)


def states_of(folder):
    """{file of tensors: hash} of all checkpoints."""
    files = sorted(folder.glob("checkpoint-*/*.safetensors"))
    assert len(files) >= 3
    return {path.relative_to(folder): sha256(path.read_bytes()).digest() for path in files}


# As net.JOB, but without a best model, which such checkpoints do not hold
ONLY_MODEL = [
    *"--max_steps 8 --num_train_epochs 2 --learning_rate 2e-3 --eval_strategy no".split(),
    *"--per_device_train_batch_size 3 --gradient_accumulation_steps 4".split(),
    *"--save_steps 1 --save_total_limit 9 --save_only_model --nonfinite stop".split(),
]


def train(tiny, folder, **fault):
    command = [sys.executable, net.INJECTOR, net.ROOT / "recipes" / "llama.py", *ONLY_MODEL]
    command += [*net.data_of(tiny), "--output_dir", folder]
    planted = json.dumps([fault] if fault else [])
    return net.Done(*net.run(command, {"FAULT_IN_LIBRARIES": planted}), folder)


@pytest.mark.parametrize(
    ("do", "code", "last"), [("nan gradient", 70, 4), ("SIGTERM", 75, 5)], ids=["NaN", "signal"]
)
def test_a_run_that_saves_the_model_alone_ends_with_a_whole_checkpoint(
    do, code, last, net_tiny, tmp_path
):
    """And continues from it: what it trains afterwards is what a run that nothing ended has."""
    tiny = net_tiny("llama")
    whole = train(tiny, tmp_path / "whole").expect(0)
    ended = train(tiny, tmp_path / "run", at="forward 18", do=do).expect(code)
    assert f"checkpoint-{last}" in net.checkpoints(ended.folder)
    done = train(tiny, tmp_path / "run").expect(0)
    assert net.figures(done.folder) == net.figures(whole.folder)
    assert net.bytes_of_result(done.folder) == net.bytes_of_result(whole.folder)
