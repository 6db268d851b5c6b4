# SPDX-License-Identifier: Apache-2.0
"""What a contestant gets, what its run leaves, and which contestants run at all."""

import json
import sys
from dataclasses import replace

import pytest

from bench import measure, runs
from bench.cells import Settings
from bench.cpu_cells import cpu_cells
from bench.gpu_cells import gpu_cells
from bench.rows import text_rows
from bench.smoke import in_small


def cell_named(cells, name):
    return next(cell for cell in cells if cell.name == name)


def test_a_rank_that_did_not_run_is_a_failure(tmp_path, monkeypatch):
    """As with `accelerate launch --cpu --num_processes 2`, which starts one process silently."""
    monkeypatch.setattr(runs, "command_of", lambda *_: [sys.executable, "-c", ""])
    cell = in_small(cell_named(cpu_cells(), "growth, ranks"))
    run = runs.run_once(cell, "2", tmp_path, Settings(tmp_path, tmp_path, smoke=True))
    assert run["failed"] == "rank 1 of 2 did not run"


def test_the_error_of_a_run_is_its_own_line():
    assert runs.error_of(["a", "ValueError: it broke", "last"]) == "ValueError: it broke"
    assert runs.error_of(["a", "last"]) == "last"
    assert runs.error_of([]) == ""


def test_a_run_says_its_speed_after_the_warm_up(tmp_path):
    probe = {"started": 2.0, "ends": [1.0, 3.0, 4.0, 5.0], "memory": {"resident": 2**20}}
    (tmp_path / "probe.json").write_text(json.dumps(probe))
    steps = [{"loss": 1.0, "num_input_tokens_seen": 10 * step} for step in (1, 2, 3, 4)]
    (tmp_path / "run").mkdir()
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_text("\n".join(json.dumps(step) for step in steps))
    run = runs.measured(tmp_path, warmup=2)
    assert run["seconds_to_first_step"] == 3.0
    assert run["seconds_per_step"] == 1.0
    assert run["tokens_per_second"] == 10.0
    assert run["memory_mib"] == {"resident": 1.0}
    metrics.write_text(json.dumps(steps[0]))
    assert runs.measured(tmp_path, 2)["failed"].startswith("4 optimizer steps, but 1 lines")


@pytest.mark.parametrize(("loaded", "number"), [([True, True, False], 3), ([True] * 9, 3)])
def test_a_disturbed_run_is_repeated_a_few_times(loaded, number, monkeypatch):
    answers = iter(loaded)
    started = []

    def run_once(cell, label, data, settings):
        started.append(label)
        return {"loaded": next(answers)}

    monkeypatch.setattr(measure, "run_once", run_once)
    run = measure.run_undisturbed(None, "ours", None, None)
    assert len(started) == number
    assert run["loaded"] == loaded[number - 1]


def test_a_contestant_without_its_package_is_left_out_with_the_reason(monkeypatch):
    monkeypatch.setattr(measure.machine, "version_of", lambda package: None)
    cell, left_out = measure.without_missing(cell_named(gpu_cells(), "1B attention"))
    assert left_out["flash_attention_2, 4096"] == "not installed: flash-attn"
    assert "sdpa, 4096" in cell.contestants
    assert "flash_attention_2, 4096" not in cell.contestants


def test_weights_are_deleted_after_measuring(tmp_path):
    (tmp_path / "run").mkdir()
    for name in ("run/model.safetensors", "run/metrics.jsonl"):
        (tmp_path / name).write_text("x")
    runs.delete_weights(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["metrics.jsonl"]


# ---- Rows ----


def test_a_gpu_without_gsm8k_trains_on_rows_of_very_different_lengths(tmp_path):
    settings = Settings(tmp_path / "out", tmp_path / "missing")
    ladder = cell_named(gpu_cells(), "3B ladder")
    lines = text_rows(ladder, {"max_length": 4096}, 50, settings)
    lengths = [len(json.loads(line)["answer"]) for line in lines]
    assert len(lengths) == 50
    assert max(lengths) > 3 * min(lengths)


def test_a_gpu_without_gsm8k_trains_on_long_rows_of_the_words_beside_the_model(tmp_path):
    settings = Settings(tmp_path / "out", tmp_path / "missing")
    folder = settings.model_folder("8B") / "data"
    folder.mkdir(parents=True)
    row = {"prompt": "Say lamp.", "completion": "lamp"}
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    cell = cell_named(gpu_cells(), "8B LoRA")
    lines = text_rows(cell, {"max_length": 64}, 3, settings)
    assert len(lines) == 3
    assert all(len(json.loads(line)["completion"]) >= 6 * 64 for line in lines)


def test_a_cell_in_small_needs_neither_a_gpu_nor_long_rows():
    for cell in (*cpu_cells(), *gpu_cells()):
        small = in_small(cell)
        assert small.device == "cpu"
        assert small.steps <= 2
        for contestant in small.contestants.values():
            flags = small.flags_of(contestant)
            assert flags["max_length"] <= 512
            assert "dtype" not in flags and "load_in_4bit" not in flags
    assert in_small(replace(cell, num_rows=7)).num_rows == 7
