# SPDX-License-Identifier: Apache-2.0
"""Three commands of scripts/ without a clone: `accelerate-recipes check|plan|copy`.

    uvx --from git+URL accelerate-recipes check fsdp.yaml --num_processes 8
    pipx run --spec git+URL accelerate-recipes plan meta-llama/Llama-3.1-8B --gpu 24GB

In the installed package this file is accelerate_recipes/__init__.py, above a copy of recipes/,
scripts/ and accelerate_configs/ (pyproject.toml).
"""

import runpy
import sys
from pathlib import Path

COMMANDS = {"check": "check_config", "plan": "plan_memory", "copy": "copy_recipe"}


def main() -> None:
    """Run the command that the first word names with the words after it."""
    name, *words = sys.argv[1:] or [""]
    if name not in COMMANDS:
        print(f"usage: accelerate-recipes {'|'.join(COMMANDS)} ... (--help)", file=sys.stderr)
        sys.exit(64)
    script = Path(__file__).parent / "scripts" / f"{COMMANDS[name]}.py"
    sys.argv = [str(script), *words]
    sys.path.insert(0, str(script.parent))  # As Python does for a script
    runpy.run_path(str(script), run_name="__main__")
