# SPDX-License-Identifier: Apache-2.0
"""The recordings of real runs in results/curves.json: loss curves, and what a command printed."""

import json
from pathlib import Path
from typing import Any

from paths import ROOT
from proof.results import versions

CURVES = ROOT / "results" / "curves.json"
NAMES = ("parity", "resume", "quickstart", "comparison", "pipeline", "meshes")

Recording = dict[str, Any]


class NotRecordedError(Exception):
    """What a picture draws is not in the file; the message has the command that records it."""


def recording_of(name: str) -> Recording:
    """Return a recording. Raises NotRecordedError if it was not made."""
    recordings = read_recordings()
    if name not in recordings:
        raise NotRecordedError(
            f"results/curves.json has no {name}: run python evidence/record_curves.py {name}"
        )
    return recordings[name]


def read_recordings(path: Path = CURVES) -> dict[str, Recording]:
    """Return all recordings by name, {} if the file does not exist."""
    if not path.is_file():
        return {}
    return json.loads(path.read_text())


def write_recording(path: Path, name: str, recording: Recording) -> None:
    """Write a recording with the versions of the libraries; other recordings in the file stay."""
    recordings = read_recordings(path)
    recordings[name] = {"versions": versions(), **recording}
    ordered = {key: recordings[key] for key in NAMES if key in recordings}
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in ordered.items()]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
