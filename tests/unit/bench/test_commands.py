# SPDX-License-Identifier: Apache-2.0
"""Cells are well formed, and every command of theirs is one that its program accepts."""

import sys
from pathlib import Path

import pytest

import benchmark_peers
import benchmark_probe
from bench import recipe
from bench.cells import Settings
from bench.commands import PEERS, PROBE, as_words, command_of, environment
from bench.cpu_cells import cpu_cells
from bench.gpu_cells import gpu_cells
from bench.trainers import common_settings
from launching import REPO

CELLS = [*cpu_cells(), *gpu_cells()]
SETTINGS = Settings(output_dir=Path("runs"), data=Path("data"))


def gpu_cell(name):
    return next(cell for cell in gpu_cells() if cell.name == name)


def parse_as(program, words, monkeypatch):
    """Let a command read its part of a command line; returns its arguments."""
    monkeypatch.setattr(sys, "argv", words)
    return program.parse_args()[1]


def test_cells_have_names_of_their_own_and_at_least_twenty_timed_steps():
    names = [cell.name for cell in CELLS]
    assert len(set(names)) == len(names)
    for cell in CELLS:
        assert cell.steps >= 20 or cell.kind == "start" or cell.num_rows // 8 >= 25, cell.name
        assert cell.kind == "growth" or list(cell.contestants)[0] == "floor", cell.name


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_command_is_accepted_by_its_program(cell, monkeypatch):
    for contestant in cell.contestants.values():
        command = command_of(cell, contestant, REPO / "rows", REPO / "runs", SETTINGS)
        probe = parse_as(benchmark_probe, command[command.index(PROBE) :], monkeypatch)
        if contestant.tool == "ours":
            assert probe.script == recipe.RECIPE
            recipe.parse_words(probe.script_args)
        else:
            assert probe.script == PEERS
            parse_as(benchmark_peers, [probe.script, *probe.script_args], monkeypatch)


def test_all_contestants_of_a_matched_cell_get_the_same_flags():
    for cell in CELLS:
        if cell.kind == "matched":
            for contestant in cell.contestants.values():
                assert contestant.flags == {}, cell.name
                assert contestant.ranks == 1, cell.name


def test_a_flag_without_a_value_is_one_word():
    assert as_words({"packing": True, "max_length": 512}) == ["--packing", "--max_length", 512]


def test_only_a_cold_start_has_a_cache_of_its_own(tmp_path):
    for cell in cpu_cells():
        for contestant in cell.contestants.values():
            variables = environment(cell, contestant, tmp_path, SETTINGS)
            is_own = variables["HF_DATASETS_CACHE"] == str(tmp_path / "cache")
            assert is_own == (cell.name == "start, cold cache"), cell.name


# ---- On a GPU ----


def test_on_a_gpu_all_contestants_compute_in_bf16(tmp_path):
    cell = gpu_cell("1B matched")
    for contestant in cell.contestants.values():
        variables = environment(cell, contestant, tmp_path, SETTINGS)
        assert variables["ACCELERATE_MIXED_PRECISION"] == "bf16"
        words = command_of(cell, contestant, tmp_path, tmp_path, SETTINGS)
        if contestant.tool != "ours":
            assert words[words.index("--mixed_precision") + 1] == "bf16"
    cpu = cpu_cells()[0]
    variables = environment(cpu, cpu.contestants["floor"], tmp_path, SETTINGS)
    assert variables["ACCELERATE_MIXED_PRECISION"] == "no"


@pytest.mark.parametrize(("precision", "bf16"), [("bf16", True), ("no", False)])
def test_peers_are_told_the_same_precision(precision, bf16, monkeypatch, tmp_path):
    words = ["benchmark_peers.py", "trainer", "--model_name_or_path", "m", "--data", "d"]
    words += ["--output_dir", str(tmp_path), "--mixed_precision", precision]
    assert common_settings(parse_as(benchmark_peers, words, monkeypatch))["bf16"] is bf16


def test_weights_that_only_a_gpu_needs_in_bf16_say_so():
    """Without fp32 weights small updates are lost, which the recipe refuses unless it is told."""
    for cell in gpu_cells():
        for contestant in cell.contestants.values():
            flags = cell.flags_of(contestant)
            if flags.get("dtype") == "bfloat16" and not flags.get("use_peft"):
                assert flags["no_master_weights"] is True, cell.name


def test_flash_attention_knows_the_borders_of_rows_beforehand():
    for contestant in gpu_cell("1B attention").contestants.values():
        if contestant.flags["attn_implementation"].startswith("flash"):
            assert contestant.flags["padding_free"]
            assert contestant.needs == "flash-attn"
