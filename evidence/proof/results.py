# SPDX-License-Identifier: Apache-2.0
"""Files of results: one JSON object, with one row per line, so that diffs are readable."""

import importlib.metadata
import json
import sys
from pathlib import Path

LIBRARIES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


def versions() -> dict[str, str]:
    """Return the versions of the libraries on which results depend."""
    return {name: importlib.metadata.version(name) for name in LIBRARIES}


def read_rows(path: Path | None) -> list[dict]:
    """Return the rows of a file; if other versions measured them, say so and return none."""
    if path is None or not path.is_file():
        return []
    before = json.loads(path.read_text())
    if before.get("versions") == versions():
        return before["rows"]
    count = len(before["rows"])
    measured = json.dumps(before.get("versions"))
    print(f"{path}: {count} rows of other versions are replaced: {measured}", file=sys.stderr)
    return []


def write_rows(path: Path, rows: list[dict]) -> None:
    """Write rows that were measured on CPU ranks, with the versions of the libraries."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    head = f'{{"device": "cpu", "versions": {json.dumps(versions())}, "rows": [\n'
    path.write_text(f"{head}{lines}\n]}}\n")
