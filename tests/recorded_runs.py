# SPDX-License-Identifier: Apache-2.0
"""Runs as their folders tell them, with made-up numbers."""

import json


def lines_of(losses):
    """Lines of training steps of one call, a second and 100 tokens each."""
    lines = []
    for step, loss in enumerate(losses, 1):
        lines.append(
            {
                "step": step,
                "loss": loss,
                "learning_rate": 1e-3,
                "num_input_tokens_seen": step * 100,
                "tokens_per_second": 100.0,
                "elapsed_seconds": float(step),
                "peak_memory_gib": 2.5,
            }
        )
    return lines


def write_run(folder, losses=(4.0, 2.0), evaluations=(), facts=None):
    """Write a run's files, and return its folder as a text."""
    folder.mkdir(parents=True)
    lines = [json.dumps(line) for line in [*lines_of(losses), *evaluations]]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    return str(folder)
