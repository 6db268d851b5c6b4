# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: every YAML writes the tensors that one process writes, and continues from those.

    pytest evidence/test_checkpoints.py --all -n 1

A run under each YAML saves after six steps. Its tensors, read whole (recipes/core/checkpoint.py),
are compared with those of the same job in one process. Then the YAML continues the run of that one
process, whose losses in the last two steps it has to give.
"""

import dataclasses
import shutil

import pytest

import net
from core.checkpoint import read_whole
from net import Cell
from test_parity import MESHES, configs, ranks_of, ranks_per_row

STEP = "checkpoint-6"
KEPT = ("--save_total_limit", "9")
LOSS = 1e-6  # relative: fp32 on ranks that add up in orders of their own
# Of a tensor's largest number: Adam divides by the root of a mean of squares, which makes small
# differences of small gradients large
TENSORS = 1e-4


def cells():
    """Return a cell for each YAML; whole but for two."""
    found = [Cell(name, ranks=ranks_of(name, 2)) for name in configs()]
    for config, ranks, sizes in MESHES:
        if not sizes and config not in {cell.config for cell in found}:
            found.append(Cell(config, ranks=ranks, sharing=ranks_per_row(config)))
    found.append(Cell("ep", "mixtral", ranks=2))
    found.append(Cell("fsdp2_ep", "mixtral", ranks=4, riding=("--ep_size", "2")))
    found.append(Cell("pp", "llama_pipeline", ranks=2, sharing=2))
    short = ("fsdp1_full_shard", "deepspeed_zero3")
    return [
        pytest.param(cell, id=cell.config, marks=() if cell.config in short else pytest.mark.whole)
        for cell in found
        if cell.config != "single"
    ]


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("cell", cells())
def test_checkpoint(cell, once, tmp_path, record):
    tiny = once(f"tiny_{cell.model}", lambda folder: net.make_tiny(cell.model, (), folder))
    alone = dataclasses.replace(cell, config="single", recipe=cell.model, ranks=1, sharing=1)
    alone = dataclasses.replace(alone, riding=())
    single = once(
        f"single_{cell.model}",
        lambda folder: net.launch(alone, tiny, folder / "run", *KEPT).expect(0),
    )
    own = net.launch(cell, tiny, tmp_path / "own", *KEPT).expect(0)
    far = distance(own.folder / STEP, single / "run" / STEP)

    continued = tmp_path / "continued"
    shutil.copytree(single / "run", continued)
    shutil.rmtree(continued / "checkpoint-8")
    (continued / "model.safetensors").unlink()
    done = net.launch(cell, tiny, continued, *KEPT).expect(0)
    assert f"Continuing from {continued / STEP}" in done.output
    losses = zip(last_losses(continued), last_losses(single / "run"), strict=True)
    off = max(abs(ours - theirs) / theirs for ours, theirs in losses)
    record(config=cell.config, ranks=cell.ranks, tensors=far, loss=off)
    assert far <= TENSORS and off <= LOSS, (far, off)


def distance(ours, theirs):
    """The largest difference of two checkpoints, relative to the largest number of its tensor."""
    expected = dict(read_whole(theirs))
    far = 0.0
    for name, tensor in read_whole(ours):
        reference = expected.pop(name).double()
        scale = reference.abs().max().item() or 1.0
        far = max(far, (tensor.double() - reference).abs().max().item() / scale)
    assert not expected, sorted(expected)[:3]
    return far


def last_losses(folder):
    """The losses of the steps after the checkpoint."""
    steps = [line for line in net.metrics(folder) if "loss" in line and line["step"] > 6]
    assert [line["step"] for line in steps] == [7, 8]
    return [line["loss"] for line in steps]
