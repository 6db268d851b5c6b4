# SPDX-License-Identifier: Apache-2.0
"""Runs and cells as evidence/benchmark.py measures them, with made-up numbers."""

from bench.gates import judge
from bench.models import MODELS


def run_of(contestant, repeat=0, losses=(3.0, 2.0), **facts):
    """A run of one contestant."""
    run = {
        "contestant": contestant,
        "repeat": repeat,
        "losses": list(losses),
        "seconds_to_first_step": 9.0,
        "seconds_per_step": 1.0,
        "tokens_per_second": 100.0,
        "memory_mib": {"resident": 500.0},
    }
    return run | facts


def cell_of(*runs, kind="matched", name="matched, medium"):
    """A cell with runs that were judged."""
    cell = {
        "cell": name,
        "kind": kind,
        "rows": "gsm8k",
        "device": "none",
        "date": "2026-01-01",
        "commit": "0",
        "versions": {},
        "warmup": 5,
        "models": {"medium": MODELS["medium"]},
        "commands": {},
    }
    cell["flags"] = {run["contestant"]: {"max_length": 512} for run in runs}
    cell["runs"] = judge(runs, kind)
    return cell
