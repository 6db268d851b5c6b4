# SPDX-License-Identifier: Apache-2.0
"""Where things are in this repository, and the one place that makes recipes/ importable.

A command finds the modules beside it, since Python puts a script's folder first on its path. What
it needs of recipes/ it reaches through the package of its topic, whose __init__.py imports this
module first.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = ROOT / "scripts"
RECIPES = ROOT / "recipes"
CONFIGS = ROOT / "accelerate_configs"

if str(RECIPES) not in sys.path:
    sys.path.append(str(RECIPES))
