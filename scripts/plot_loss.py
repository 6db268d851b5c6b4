#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Draw a run, or compare several, from RUN_DIR/metrics.jsonl.

    python scripts/plot_loss.py runs/tiny/run
    python scripts/plot_loss.py runs/ddp runs/fsdp --output runs/compare.png
    python scripts/plot_loss.py runs/tiny/run --panels loss grad_norm

The picture of one run has its loss and its learning rate. That of several runs also has what they
recorded of these: the metrics of their evaluations, tokens per second, and peak memory. A table of
the same is printed, and in which arguments the runs differ: the final loss is a mean over the last
twentieth of the steps, the speed that of the last call.

The picture is written to loss.png in the folder of the run, or to comparison.png in that of the
first run, unless --output names a file.

Exit codes: 0 done, 64 usage, 65 data, 73 cannot write.
"""

import argparse
import json
from pathlib import Path

from common import Exit, Parser, run_command, stop


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
    """Draw the runs that the command line names, and print how several of them compare."""
    args = parse_args()
    # Imported here since it takes a second: a wrong flag and --help are answered at once
    from plotting.picture import draw, wanted_panels
    from plotting.runs import names_of, read_run, rows_of, table

    runs = [read_run(folder) for folder in args.run_dirs]
    panels = wanted_panels(args.panels, runs)
    if not panels:
        stop(Exit.DATA, f"no panel {' '.join(args.panels)}: no run has it in its metrics.jsonl")
    name = "loss.png" if len(runs) == 1 else "comparison.png"
    output = args.output or Path(runs[0].folder, name)
    rows = rows_of(runs)
    try:
        draw(runs, panels).savefig(output, dpi=150)
        if args.json is not None:
            args.json.write_text(json.dumps({"runs": rows}, indent=1) + "\n", encoding="utf-8")
    except (OSError, ValueError) as error:  # An unknown ending is a ValueError
        stop(Exit.CANNOT_WRITE, f"cannot write {output}: {error}")
    if len(runs) > 1:
        print("\n".join(table(names_of(runs), rows)))
        print()
    print(output)


if __name__ == "__main__":
    run_command(main)
