# SPDX-License-Identifier: Apache-2.0
"""Makes scripts/ and tests/ importable for what is started from here."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests")]
