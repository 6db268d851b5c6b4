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
# The YAML to start with, and the name that says what it does: a copy instead of a link, since a
# download of a link, or a checkout on Windows, is a file that holds nothing but a name.
FIRST_CHOICE = CONFIGS / "fsdp.yaml"
SAME_AS_FIRST_CHOICE = CONFIGS / "fsdp2_full_shard.yaml"
# The YAML of recipes/llama_pipeline.py, which means the same as ddp.yaml for every other recipe
OF_PIPELINES = CONFIGS / "pp.yaml"
# Those of recipes/mixtral.py with --ep_size, which otherwise mean the same as others
OF_EXPERTS = (CONFIGS / "ep.yaml", CONFIGS / "fsdp2_ep.yaml")

if str(RECIPES) not in sys.path:
    sys.path.append(str(RECIPES))
