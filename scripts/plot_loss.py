#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Draw a run, or compare several, from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output runs/compare.png
    python scripts/plot_loss.py runs/tiny/run --panels loss grad_norm

The picture of one run has its loss and its learning rate. That of several runs also has what they
recorded of these: the metrics of their evaluations, tokens per second, and peak memory. A table of
the same is printed: the final loss is a mean over the last twentieth of the steps, the speed that
of the last call. Names of runs say in which arguments they differ.

The picture is written to loss.png in the folder of the run, or to comparison.png in that of the
first run, unless --output names a file.

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
from pathlib import Path

from common import Parser, run_command


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("run_dirs", nargs="+", metavar="RUN_DIR", help="the --output_dir of a run")
    add("--output", help="picture to write; .png, .pdf or .svg [loss.png or comparison.png]")
    add(
        "--panels",
        nargs="+",
        metavar="PANEL",
        help="loss, eval (each metric of the evaluations), tokens_per_second, memory, "
        "learning_rate, or any metric of metrics.jsonl [for one run loss and learning_rate, for "
        "several all of these]",
    )
    add("--json", type=Path, metavar="FILE", help="also write the numbers of each run here")
    return parser.parse_args()


def main() -> None:
    """Draw the runs that the command line names."""
    args = parse_args()
    # Imported here since it takes a second: a wrong flag and --help are answered at once
    from plotting.session import run

    run(args)


if __name__ == "__main__":
    run_command(main)
