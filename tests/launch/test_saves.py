# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds is the state of its step, however late it is written."""

from hashlib import sha256

import pytest

import net
from launching import rehearse
from net import Cell

# Evaluations in the same steps, since the best model is saved too
SAVES = "--save_steps 3 --eval_steps 3 --save_total_limit 9".split()


@pytest.mark.parametrize(
    "cell", [Cell(), Cell("fsdp2_full_shard", ranks=2)], ids=lambda cell: cell.config
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


def test_a_result_is_that_of_the_last_step_without_any_save(net_tiny, tmp_path):
    """An evaluation leaves whole weights behind, which FSDP frees."""
    model_and_rows = net.data_of(net_tiny("llama"))
    results = []
    for every in (0, 2):
        folder = tmp_path / str(every)
        flags = ["--max_steps", 2, "--save_steps", every, "--output_dir", folder]
        rehearse("fsdp2_full_shard", *model_and_rows, *flags, num_processes=2, code=0)
        assert any(folder.glob("checkpoint-*")) == bool(every)
        results.append((folder / "model.safetensors").read_bytes())
    assert results[0] == results[1]
