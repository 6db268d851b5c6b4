# SPDX-License-Identifier: Apache-2.0
"""Record real runs for the pictures: under every YAML, resumed, the quick start, and others.

    python evidence/record_curves.py             # about 15 minutes on two CPU cores
    python evidence/record_curves.py resume      # one of them; the others in the file stay

All runs are on CPU, with tiny models that are made offline. `parity` launches the job of
evidence/parity.py under every YAML, `resume` kills a run with SIGKILL and continues it,
`quickstart` runs `make quickstart-llama`, `comparison` trains at three learning rates, `pipeline`
notes when two ranks of a pipeline compute what, under each schedule, and `meshes` notes which part
of weights, rows and tokens each rank has under tensor, context, sequence, expert and pipeline
parallelism.
evidence/draw.py draws the pictures from the file.

Exit codes: 0 done, 1 a run failed, 64 usage.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import run_command
from pictures.recordings import CURVES, NAMES, write_recording
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help=f"{', '.join(NAMES)} (default: all)",
    )
    parser.add_argument(
        "--json", type=Path, default=CURVES, metavar="PATH", help="file to write to (%(default)s)"
    )
    args = parser.parse_args()
    for name in args.names:
        if name not in NAMES:
            parser.error(f"{name}: no such recording; choose from {', '.join(NAMES)}")
    return args


def main() -> None:
    """Record the chosen runs, one after the other."""
    args = parse_args()
    # Imported here, since it takes seconds and a wrong call should be refused at once.
    from pictures.real_runs import RECORDERS, RecordingError

    for name in args.names or NAMES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                recording = RECORDERS[name](Path(folder))
            except RecordingError as error:
                sys.exit(f"record_curves.py: {name}: {error}")
        write_recording(args.json, name, recording)


if __name__ == "__main__":
    run_command(main)
