# SPDX-License-Identifier: Apache-2.0
"""Start one rank of a rehearsal: a program that `accelerate launch` starts instead of the recipe.

It is not meant to be called by hand. `scripts/rehearse.py` lets `accelerate launch` start this file
in every rank, followed by the recipe and its arguments. `rehearsal.rank` makes accelerate treat
gloo CPU ranks as it treats GPUs, and measures the rank; then the recipe runs as `python RECIPE ...`
would run it.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Prepare the rank, and give the recipe the sys.argv and sys.path that python would give it.

    This project's scripts/ is on the path only until then, so that a copied recipe does not find
    modules there that it will not find in production.
    """
    recipe, *arguments = sys.argv[1:]
    # Its folder in place of this file's, and before recipes/, which this project's modules add
    sys.path[0] = os.path.dirname(os.path.abspath(recipe))
    import_path = list(sys.path)
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from rehearsal import rank

    this_rank = rank.prepare()
    sys.argv = [recipe, *arguments]
    sys.path[:] = import_path
    rank.run(recipe, this_rank)


if __name__ == "__main__":
    main()
