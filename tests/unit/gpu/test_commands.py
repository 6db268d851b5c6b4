# SPDX-License-Identifier: Apache-2.0
"""Every command line that only a GPU runs is one that its programs accept."""

import subprocess
import sys
import time

import pytest

import benchmark_peers
import benchmark_probe
import llama
import rehearse
import vit
from bench import measure, prepare, runs
from bench.commands import command_of
from components.cli import parse_arguments
from gpu import contests, launches, levers, side_by_side
from gpu.catalog import CELLS
from gpu.cell import Setup

PROGRAMS = {
    "recipes/llama.py": llama,
    "recipes/vit.py": vit,
    "evidence/benchmark_peers.py": benchmark_peers,
    "scripts/rehearse.py": rehearse,
    "evidence/benchmark_probe.py": benchmark_probe,
}
# Modules whose cells start a recipe by a command line
LAUNCHING = (
    "strategies",
    "precisions",
    "resume",
    "quantized",
    "levers",
    "host",
    "fragmentation",
    "saves",
)
FUNCTIONS = (
    "masks.packed_rows",
    "plans.small",
    "plans.large",
    "side_by_side.eight_b_lora",
    "side_by_side.eight_b_full",
    "side_by_side.eight_b_qlora",
    "side_by_side.one_b_full",
)


def starts_a_recipe(cell):
    return cell.function in FUNCTIONS or cell.function.split(".")[0] in LAUNCHING


@pytest.fixture
def on_a_gpu(tmp_path, monkeypatch):
    """A Setup of a GPU, whose command lines are collected, and nothing is started."""
    commands = []

    def train_all(setup, variants, data):
        for variant in variants:
            commands.append(launches.command_of(setup, variant, data, tmp_path))
        return [launches.Trained(variant, None, "left out: not started") for variant in variants]

    def run_once(cell, label, data, settings):
        commands.append(command_of(cell, cell.contestants[label], data, tmp_path, settings))
        return {"failed": "not started"}

    def run(command, **options):
        commands.append([str(word) for word in command])
        return subprocess.CompletedProcess(command, 1, "not started")

    monkeypatch.setattr(launches, "train_all", train_all)
    monkeypatch.setattr(launches, "tiny_model", lambda setup: tmp_path)
    monkeypatch.setattr(launches, "wide_model", lambda setup: tmp_path)
    monkeypatch.setattr(launches, "made", lambda folder, command: tmp_path)
    monkeypatch.setattr(launches, "require_compiler", lambda: None)
    monkeypatch.setattr(launches.subprocess, "run", run)
    monkeypatch.setattr(launches.machine, "nvidia_smi", lambda *options: [])
    monkeypatch.setattr(runs, "run_once", run_once)
    monkeypatch.setattr(prepare, "make_models", lambda names, settings: None)
    monkeypatch.setattr(prepare, "prepare", lambda cell, contestant, settings: tmp_path)
    monkeypatch.setattr(measure, "without_missing", lambda cell: (cell, {}))
    for module in (contests, levers, side_by_side):
        monkeypatch.setattr(module, "device_name", lambda setup: "a GPU")
    return Setup("cuda", False, tmp_path, tmp_path, time.monotonic() + 999), commands


def test_most_cells_are_among_them():
    others = {cell.name.split(".")[0] for cell in CELLS if not starts_a_recipe(cell)}
    assert others == {"micro", "masks", "signals", "recipes", "models", "attention", "planner"}


@pytest.mark.parametrize(
    "cell", [cell for cell in CELLS if starts_a_recipe(cell)], ids=lambda cell: cell.name
)
def test_every_command_for_a_gpu_is_accepted(cell, on_a_gpu, monkeypatch):
    setup, commands = on_a_gpu
    try:
        cell.run(setup)
    except RuntimeError as error:
        assert "not started" in str(error)
    assert commands
    for command in commands:
        check(command, monkeypatch)


def check(command, monkeypatch):
    """Let each program of a command line read what is meant for it."""
    known = [place for place, word in enumerate(command) if word in PROGRAMS]
    assert known, command
    for place in known:
        program = PROGRAMS[command[place]]
        if hasattr(program, "Arguments"):  # a recipe
            parse_arguments(program.Arguments, words=command[place + 1 :])
            continue
        monkeypatch.setattr(sys, "argv", command[place:])
        program.parse_args()
    if "recipes/llama.py" in command and "--attn_implementation" in command:
        kernel = command[command.index("--attn_implementation") + 1]
        assert kernel in ("eager", "sdpa", "flex_attention", "flash_attention_2", "varlen")
