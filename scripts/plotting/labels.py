# SPDX-License-Identifier: Apache-2.0
"""In what runs differ, as run.json says, and how they are named in pictures and tables."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from plotting.runs import RecordedRun

# Arguments that do not change what is learned: of files, of the machine, and of evaluations
NOT_COMPARED = {
    "output_dir",
    "run_name",
    "report_to",
    "save_steps",
    "async_save",
    "save_total_limit",
    "resume_from_checkpoint",
    "allow_change",
    "logging_steps",
    "ddp_timeout",
    "dry_run",
    "dataset_num_proc",
    "dataloader_num_workers",
    "eval_strategy",
    "eval_steps",
    "eval_on_start",
    "per_device_eval_batch_size",
    "predict_with_generate",
    "num_predictions",
    "generation_max_new_tokens",
    "metric_for_best_model",
    "greater_is_better",
}
STRATEGY = "strategy"  # its values are sentences that need no name before them
MOST_SETTINGS = 3  # a legend with more of them is not read
LONGEST_VALUE = 32  # characters
LONGEST_NAME = 40


def settings_of(run: RecordedRun) -> dict[str, Any]:
    """Return what run.json says about a run: strategy, precision and arguments by their names."""
    settings = {}
    if STRATEGY in run.facts.get("summary", {}):
        settings[STRATEGY] = run.facts["summary"][STRATEGY]
    if "ACCELERATE_MIXED_PRECISION" in run.facts.get("launch", {}):
        settings["mixed_precision"] = run.facts["launch"]["ACCELERATE_MIXED_PRECISION"]
    for name, value in run.facts.get("arguments", {}).items():
        if name not in NOT_COMPARED:
            settings[name] = value
    return settings


def differences(runs: Sequence[RecordedRun]) -> list[dict[str, Any]]:
    """Return for each run the settings in which the runs differ.

    Runs without a run.json are not compared, and have none.
    """
    everything = [settings_of(run) for run in runs]
    known = [settings for settings in everything if settings]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    differing = []
    for name in names:
        values = {json.dumps(settings.get(name), sort_keys=True) for settings in known}
        if len(values) > 1:
            differing.append(name)
    found = []
    for settings in everything:
        found.append({name: settings[name] for name in differing if name in settings})
    return found


def setting_text(name: str, value: Any) -> str:
    """Return a setting as a label has it, such as learning_rate=0.001."""
    if isinstance(value, list):
        text = ",".join(str(item) for item in value)
    elif isinstance(value, float):
        text = f"{value:g}"
    elif isinstance(value, bool) or value is None:
        text = json.dumps(value)
    else:
        text = str(value)
    text = shortened(" ".join(text.split()), LONGEST_VALUE)
    if name == STRATEGY:
        return text
    return f"{name}={text}"


def shortened(text: str, longest: int) -> str:
    """Return a text of at most `longest` characters: what is cut out is its middle."""
    if len(text) <= longest:
        return text
    head = (longest - 1) // 2
    tail = longest - 1 - head
    return f"{text[:head]}…{text[-tail:]}"


def labels_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return how a legend names each run: its folder, and in what it differs from the others.

    One run needs no name. Where runs differ in more than a few settings, the legend has only
    their folders, and the table says the rest.
    """
    if len(runs) == 1:
        return [""]
    labels = []
    for name, settings in zip(names_of(runs), differences(runs), strict=True):
        parts = [setting_text(*setting) for setting in settings.items()]
        label = shortened(name, LONGEST_NAME)
        if 0 < len(parts) <= MOST_SETTINGS:
            label = f"{label}: {', '.join(parts)}"
        labels.append(label)
    return labels


def names_of(runs: Sequence[RecordedRun]) -> list[str]:
    """Return for each run the part of its folder's path in which it differs from the others."""
    if len(runs) == 1:
        return [runs[0].folder]
    paths = [list(Path(run.folder).parts) for run in runs]
    for end in (0, -1):
        while all(len(parts) > 1 and parts[end] == paths[0][end] for parts in paths):
            for parts in paths:
                del parts[end]
    return ["/".join(parts) for parts in paths]
