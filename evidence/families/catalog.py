# SPDX-License-Identifier: Apache-2.0
"""The model families with their tiny configurations, which catalog.yaml holds as plain data."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

Settings = Mapping[str, Any]

CATALOG = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SHARED: Settings = CATALOG["shared"]
FAMILIES: Mapping[str, Settings] = CATALOG["families"]
NUM_ROWS = 16  # all families are trained on the same rows, of 20 to 50 tokens
