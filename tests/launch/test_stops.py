# SPDX-License-Identifier: Apache-2.0
"""Whatever ends a run, the same command continues with the recorded figures, and loses nothing.

Each test ends a run in one way, planted in the libraries below it (tests/inject.py), resumes it
once and holds all of its lines against the golden row of a run that nothing ended (test_cells.py).
That a loss of power leaves whole checkpoints is shown by a probe of flushes and renames: a kill
cannot show it, since the page cache survives.
"""

import json
import os
import re
import sys
import time
from hashlib import sha256

import pytest

import net
from launching import starting_cold
from net import Cell

ONE = Cell()
TWO = Cell("ddp", ranks=2)
SHARDED = Cell("fsdp2_full_shard", ranks=2)
WITH_LOADER = Cell(riding=("--dataloader_num_workers", "1"))


def ends(at, do="SIGTERM", **fields):
    return {"at": at, "do": do, **fields}


# name: (cell, fault, how it ends); 1 is what a launcher makes of a signal
ENDINGS = {
    "SIGTERM in a step": (ONE, ends("forward 14"), 75),
    "SIGTERM while rows are prepared": (ONE, ends("map 1"), 75),
    "SIGKILL in a step": (ONE, ends("forward 18", "SIGKILL"), -9),
    "SIGKILL of one rank that shards": (SHARDED, ends("forward 10", "SIGKILL", rank=0), 1),
    "a weight that is not finite": (ONE, ends("step 5", "nan weight"), 70),
    "a full disk": (ONE, ends("step 3", "limit files", size=200_000), 73),
    "SIGTERM to a group with a loader": (WITH_LOADER, ends("forward 14", to="group"), 75),
}


LEFT = ["checkpoints"]  # A run that ended has written more of them, or fewer


def test_a_rank_that_is_suspended_hangs_no_run(net_tiny, golden, tmp_path):
    """Also before the loop the others wait for as long as --ddp_timeout says.

    Then the run ends; or the rank continues, woken by the signal that asks it for its stacks.
    """
    tiny = net_tiny("llama")
    fault = ends("load 1", "SIGSTOP", rank=1)
    done = net.launch(TWO, tiny, tmp_path / "run", "--ddp_timeout", "5", inject=fault)
    assert "File" in done.output  # The stacks
    if done.code != 0:
        done = net.launch(TWO, tiny, tmp_path / "run").expect(0)
    golden.check("cells", TWO.row, row_of(done, tiny), own_name="suspended", without=LEFT)


# What only the system's own processes have: a warm start (tests/warm) has other parents
OF_PROCESSES = {
    "SIGTERM to the launcher": (TWO, ends("forward 8", to="parent", rank=0), [75]),
    # The ranks end with 75 a moment later, or before the rehearsal sees that the launcher is gone
    "SIGKILL of the launcher": (TWO, ends("forward 8", "SIGKILL", to="parent", rank=0), [1, 75]),
}


@pytest.mark.parametrize("name", OF_PROCESSES, ids=lambda name: name.replace(" ", "-"))
def test_a_run_whose_processes_were_ended_goes_on(name, net_tiny, golden, tmp_path):
    cell, fault, codes = OF_PROCESSES[name]
    tiny = net_tiny("llama")
    with starting_cold():
        done = net.launch(cell, tiny, tmp_path / "run", inject=fault)
    assert done.code in codes, done.output[-4000:]
    wait_until_ended(tmp_path / "run")
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    golden.check("cells", cell.row, row_of(done, tiny), own_name=name, without=LEFT)


def wait_until_ended(folder):
    """Ranks without a launcher notice that, save and end."""
    for _ in range(600):
        if json.loads((folder / "status.json").read_text())["state"] != "running":
            return
        time.sleep(0.1)
    raise AssertionError("the ranks live on")


@pytest.mark.parametrize("name", ENDINGS, ids=lambda name: name.replace(" ", "-"))
def test_a_run_that_ended_goes_on_with_the_recorded_figures(name, net_tiny, golden, tmp_path):
    cell, fault, code = ENDINGS[name]
    tiny = net_tiny("llama")
    net.launch(cell, tiny, tmp_path / "run", inject=fault).expect(code)
    done = net.launch(cell, tiny, tmp_path / "run").expect(0)
    golden.check("cells", cell.row, row_of(done, tiny), own_name=name, without=LEFT)


def row_of(done, tiny):
    return {
        "figures": net.figures(done.folder),
        "tensors": net.tensors(done.folder),
        "saved_loss": net.saved_loss(done.folder, tiny),
    }


def test_a_gradient_that_is_not_finite_changes_nothing(net_tiny, golden, tmp_path):
    tiny = net_tiny("llama")
    fault = ends("forward 9", "nan gradient")
    done = net.launch(ONE, tiny, tmp_path / "run", "--nonfinite", "stop", inject=fault).expect(70)
    done = net.launch(ONE, tiny, tmp_path / "run").expect(0)
    golden.check("cells", ONE.row, row_of(done, tiny), own_name="not finite", without=LEFT)
    skipping = net.launch(ONE, tiny, tmp_path / "skip", "--nonfinite", "skip", inject=fault)
    lines = net.figures(skipping.expect(0).folder)
    losses = {line["eval_loss"] for line in lines if line["step"] >= 4 and "eval_loss" in line}
    assert len(losses) == 1  # No step from there on changed a weight


def test_a_damaged_checkpoint_is_passed_over_and_an_older_one_read(net_tiny, golden, tmp_path):
    tiny = net_tiny("llama")
    net.launch(ONE, tiny, tmp_path / "run", inject=ends("forward 30", "SIGKILL")).expect(-9)
    newest = max((tmp_path / "run").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    done = net.launch(ONE, tiny, tmp_path / "run").expect(0)
    assert newest.name in done.output
    golden.check("cells", ONE.row, row_of(done, tiny), own_name="damage", without=LEFT)


def test_a_folder_in_use_is_refused_and_the_run_in_it_goes_on(net_tiny, golden, tmp_path):
    """The second run is started by the first one's hook, while it waits in a step."""
    tiny = net_tiny("llama")
    words = [sys.executable, net.ROOT / "recipes" / "llama.py", *net.data_of(tiny)]
    words += ["--output_dir", tmp_path / "run", *ONE.arguments]
    fault = ends("forward 14", "run", command=[str(word) for word in words])
    done = net.launch(ONE, tiny, tmp_path / "run", inject=fault).expect(0)
    assert "ended with 64" in done.output
    golden.check("cells", ONE.row, row_of(done, tiny), own_name="in use", without=LEFT)


def test_a_checkpoint_is_flushed_before_it_has_its_name(net_tiny, tmp_path):
    """And the folder that holds it afterwards: a loss of power leaves whole checkpoints only."""
    notes = tmp_path / "notes.jsonl"
    done = net.launch(ONE, net_tiny("llama"), tmp_path / "run", notes=notes).expect(0)
    log = [json.loads(line) for line in notes.read_text().splitlines()]
    renames = [
        (number, *event[1:])
        for number, event in enumerate(log)
        if event[0] == "rename" and re.fullmatch(r"checkpoint-\d+", os.path.basename(event[2]))
    ]
    assert len(renames) >= 3, log
    for number, source, target, inside in renames:
        flushed = {event[1] for event in log[:number] if event[0] == "flush"}
        assert {f"{source}/{name}" for name in inside} | {source} <= flushed
        assert ["flush", os.path.dirname(target)] in log[number:]
    assert net.checkpoints(done.folder)
    # And all files of the result before the first of them takes its place
    of_result = [event for event in log if "model.staging/" in event[1]]
    flushed = [event[1] for event in of_result if event[0] == "flush"]
    moved = [event[1] for event in of_result if event[0] == "rename"]
    assert len(moved) > 3 and {*moved} <= {*flushed}
    assert [event[0] for event in of_result] == ["flush"] * len(flushed) + ["rename"] * len(moved)


def test_a_crash_at_any_change_of_a_save_leaves_whole_checkpoints(net_tiny, tmp_path):
    """Three saves, of which the last two delete an older one: what has its name never changes."""
    copies = tmp_path / "copies"
    copies.mkdir()
    fault = ends("step 3", "copy at changes", command=[str(tmp_path / "run"), str(copies)])
    net.launch(ONE, net_tiny("llama"), tmp_path / "run", inject=fault).expect(0)
    seen = {}
    numbers = sorted(int(path.name) for path in copies.iterdir())
    assert len(numbers) > 50
    for folder in [*(copies / str(number) for number in numbers), tmp_path / "run"]:
        names = [path.name[len("checkpoint-") :] for path in folder.glob("checkpoint-*")]
        steps = [int(name) for name in names if name.isdigit()]
        for step in steps:
            found = {}
            for file in (folder / f"checkpoint-{step}").iterdir():
                found[file.name] = sha256(file.read_bytes()).digest()
            first = seen.setdefault(step, found)
            is_being_deleted = step < max(steps)
            assert found == first or (is_being_deleted and found.items() <= first.items()), folder
        assert steps or not seen  # From the first save on there is always one
    assert {3, 6, 8} <= seen.keys()
