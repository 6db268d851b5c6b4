#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Make, offline, a tiny random model that a recipe can train, and rows for it.

    python scripts/make_tiny.py llama runs/tiny
    python scripts/make_tiny.py mixtral runs/tiny_mixtral --num_local_experts 8

FOLDER/model is for the recipe's --model_name_or_path, and FOLDER/data holds the rows or images. The
model learns them in minutes on a CPU, and no test row is a training row. `make_tiny.py RECIPE
--help` describes what is written for a recipe and lists its options.

Exit codes: 0 done, 64 usage, 73 cannot write.
"""

import argparse

from common import run_command
from tiny import makers


def parse_args() -> argparse.Namespace:
    return makers.parse(None, __doc__)


def main() -> None:
    makers.carry_out(parse_args())


if __name__ == "__main__":
    run_command(main)
