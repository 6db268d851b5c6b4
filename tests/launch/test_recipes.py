# SPDX-License-Identifier: Apache-2.0
"""What single recipes do besides: images, streams and references.

Their numbers are in test_cells.py, stopped runs in test_chains.py, bad rows in test_refusals.py.
"""

import shutil

import golden
import net
from launching import errors_of, read_json, script
from net import Cell


# ---- vit ----
def test_an_image_that_breaks_in_a_loader_is_named_and_a_checkpoint_is_there(net_tiny, tmp_path):
    flags = ("--dataloader_num_workers", "1", "--save_steps", "2")
    tiny = shutil.copytree(net_tiny("vit"), tmp_path / "tiny")
    bad = sorted((tiny / "data" / "train").glob("*/*"))[8]  # The last of the first epoch
    content = bad.read_bytes()
    # Head and end are sound
    bad.write_bytes(content[:100] + bytes(len(content) - 112) + content[-12:])
    done = net.launch(Cell(recipe="vit", flags=flags), tiny, tmp_path / "run").expect(1)
    assert str(bad) in done.output
    assert "checkpoint-2" in net.checkpoints(done.folder)
    status = read_json(done.folder / "status.json")
    assert status["state"] == "failed" and str(bad) in status["why"]


# ---- llama_dpo ----
def test_it_learns_to_prefer_and_a_resumed_run_reads_its_reference(net_tiny, tmp_path):
    """Not the model that is trained, which is another one after the first step."""
    tiny, folder = net_tiny("llama_dpo"), tmp_path / "run"
    one = Cell(recipe="llama_dpo", flags=("--learning_rate", "1e-3"))
    two = Cell("fsdp2_full_shard", "llama_dpo", ranks=2, flags=one.flags)
    stop = {"at": "step 4", "do": "SIGTERM"}
    net.launch(one, tiny, folder, inject=stop).expect(75)
    assert len(list(folder.glob("reference-*.table"))) == 1
    done = net.launch(two, tiny, folder).expect(0)
    assert "Continuing from" in done.output and "Reference:" not in done.output
    lines = net.metrics(folder)
    evaluations = [line for line in lines if "eval_loss" in line]
    assert evaluations[-1]["eval_loss"] < 0.6 < abs(lines[0]["loss"])
    assert evaluations[-1]["eval_rewards/accuracies"] > 0.6  # Chance is a half


# ---- mistral_pretrain ----
RECIPE = "mistral_pretrain"
STREAM = ("--streaming", "--shuffle_buffer_size", "16", "--max_length", "48")


def test_ranks_end_with_the_last_token_of_the_last_pass(net_tiny, tmp_path):
    tiny = net_tiny(RECIPE)
    flags = (*STREAM, "--max_steps", "-1", "--max_length", "80")
    found = []
    for cell in (
        Cell(recipe=RECIPE, flags=flags),
        Cell("ddp", recipe=RECIPE, flags=flags, ranks=2),
    ):
        done = net.launch(cell, tiny, tmp_path / cell.config).expect(0)
        assert "Read 2 whole passes and 0 documents" in done.output, done.output[-3000:]
        found.append(net.figures(done.folder))
    seen = [line["num_input_tokens_seen"] for line in found[0] if "loss" in line]
    assert seen[-1] - seen[-2] < 12 * 80  # The last step is a shorter one
    assert golden.differences(*found, 1e-5) == []


def test_a_bad_document_ends_a_run_with_a_checkpoint_from_which_it_goes_on(net_tiny, tmp_path):
    tiny = shutil.copytree(net_tiny(RECIPE), tmp_path / "tiny")
    rows = tiny / "data" / "train.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    lines[30] = '{"text": "Lamo is\n'
    rows.write_text("".join(lines))
    cell = Cell(recipe=RECIPE, flags=STREAM)
    done = net.launch(cell, tiny, tmp_path / "run").expect(65)
    (error,) = errors_of(done)
    assert "line 31" in error
    assert net.checkpoints(done.folder)
    assert read_json(done.folder / "status.json")["exit_code"] == 65
    skip = ("--skip_bad_rows", "--allow_change", "skip_bad_rows")
    done = net.launch(cell, tiny, tmp_path / "run", *skip).expect(0)
    assert "Continuing from" in done.output
    words = ["--raw", "--prompt", "Lamo is a", "--max_new_tokens", 4]
    assert "Lamo is a ->" in script("generate", tmp_path / "run", *words, code=0).output
