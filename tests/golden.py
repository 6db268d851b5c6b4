# SPDX-License-Identifier: Apache-2.0
"""Recorded figures: write them, and hold others against them.

A subject is one file of tests/golden/ with one row a line, so that a diff says what changed. Whole
numbers, names and texts are equal or not; other figures may differ by a bound, relatively. With
`pytest --record` the rows that ran are written, in a commit that changes nothing else and says why.
GOLDEN names another folder of files, and with EXACT every row is recorded (tests/compare.py).
"""

import json
import os
import tempfile
from importlib import metadata
from pathlib import Path

from filelock import FileLock

FOLDER = Path(os.environ.get("GOLDEN", Path(__file__).with_name("golden")))
LIBRARIES = ("torch", "transformers", "accelerate", "peft", "deepspeed", "bitsandbytes", "datasets")
# Bits differ between CPUs. Measured over other kernels: fp32 and nf4 2e-7, bf16 1.6e-3, and int8
# 1.6e-5 in an evaluation, where a rounded activation can tip over. In float8 it then moves by 6 %:
# within eight steps micro-batches of another size give 1.4e-3 in the loss and 4.8e-3 in the
# gradient norm, in one process as on ranks.
BOUNDS = {"fp32": 1e-5, "int8": 2e-4, "bf16": 5e-3, "float8": 1e-2}


def read(subject):
    """The recorded rows of a subject, {name: row}."""
    path = FOLDER / f"{subject}.json"
    if not path.exists():
        return {}
    return json.loads(path.read_text())["rows"]


def record(subject, name, row):
    """Write a row among those of its subject."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{subject}.json"
    # Beside the files it would have to be deleted, which another process may wait for
    with FileLock(Path(tempfile.gettempdir(), f"golden-{os.getuid()}-{subject}.lock")):
        rows = read(subject) | {name: row}
        versions = {library: metadata.version(library) for library in LIBRARIES}
        lines = [f"{json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows)]
        head = f'{{"versions": {json.dumps(versions)},\n"rows": {{\n'
        path.write_text(head + ",\n".join(lines) + "\n}}\n")


def differences(expected, found, bound, where="", without=()):
    """Where two values differ, as lines in their order; none if they agree.

    Args:
        bound: relative, of figures that are no whole numbers; 0 asks for equal bits.
        without: keys that are not compared.
    """
    if isinstance(expected, dict) and isinstance(found, dict):
        lines = []
        for key in [*expected, *(key for key in found if key not in expected)]:
            if key in without:
                continue
            if key not in expected or key not in found:
                lines.append(f"{where}.{key}: only {'found' if key in found else 'recorded'}")
            else:
                lines += differences(expected[key], found[key], bound, f"{where}.{key}", without)
        return lines
    if isinstance(expected, list) and isinstance(found, list):
        if len(expected) != len(found):
            return [f"{where}: {len(expected)} recorded, {len(found)} found"]
        lines = []
        for number, pair in enumerate(zip(expected, found, strict=True)):
            lines += differences(*pair, bound, f"{where}[{number}]", without)
        return lines
    if isinstance(expected, float) and isinstance(found, float):
        off = abs(expected - found) / max(abs(expected), abs(found), 1e-6)
        return (
            [] if off <= bound else [f"{where}: {expected!r} recorded, {found!r} found ({off:.1e})"]
        )
    return [] if expected == found else [f"{where}: {expected!r} recorded, {found!r} found"]


class Golden:
    """The recorded rows, for a test: `check` compares, or records if pytest was told to."""

    def __init__(self, recording):
        self.recording = recording

    def check(self, subject, name, row, bound="fp32", own_name=None, without=()):
        """Hold a row against its record.

        Args:
            bound: a key of BOUNDS.
            own_name: of a row that shares its record with others, and that is not recorded itself
                unless every row is, for a comparison of bits (EXACT).
            without: keys that are not compared.
        """
        row = json.loads(json.dumps(row))
        if os.environ.get("EXACT"):
            record(subject, own_name or name, row)
            return
        if self.recording and own_name is None:
            record(subject, name, row)
            return
        recorded = read(subject)
        assert name in recorded, f"{subject}.json has no row {name!r}: pytest --record"
        lines = differences(recorded[name], row, BOUNDS[bound], without=without)
        assert not lines, "\n".join([f"{subject}.json, {name}:", *lines[:12]])
