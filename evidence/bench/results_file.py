# SPDX-License-Identifier: Apache-2.0
"""The file of a benchmark's results."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_results(path: Path, rows: Sequence[Any]) -> None:
    """Write rows as JSON, one on a line; the folder is made if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"rows": [\n{lines}\n]}}\n')
