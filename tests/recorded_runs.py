# SPDX-License-Identifier: Apache-2.0
"""Runs as their folders tell them, with made-up numbers."""

import json


def lines_of(losses, first_step=1, seconds=1.0, tokens=100, before=0):
    """Lines of training steps of one call that takes `seconds` and sees `tokens` in each."""
    lines = []
    for number, loss in enumerate(losses, 1):
        lines.append(
            {
                "step": first_step + number - 1,
                "loss": loss,
                "learning_rate": 1e-3,
                "num_input_tokens_seen": before + number * tokens,
                "tokens_per_second": tokens / seconds,
                "elapsed_seconds": number * seconds,
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
