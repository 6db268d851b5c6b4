# SPDX-License-Identifier: Apache-2.0
"""Makes scripts/ and recipes/ importable for what is started from here."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
