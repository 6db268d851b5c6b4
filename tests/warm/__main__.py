# SPDX-License-Identifier: Apache-2.0
"""Warm starts: fork processes in which torch and the other libraries are already imported.

    python tests/warm start     # print the path of a program to use in place of `python`
    python tests/warm stop

Half of the time of a short launch goes into imports, in each of its processes. A server imports the
libraries once and forks a process for each request. That process does what `python SCRIPT ...` or
`python -m MODULE ...` would do, with the same arguments, environment, folder, limits and streams.
Its own children start warm too, since its sys.executable is the program above. No file of this
project is imported in advance, so that an edit takes effect at once.

A start falls back to the interpreter itself, and prints why, where a warm process would differ: a
variable that the libraries read while they were imported has another value, or the server is gone.
Some differences remain: the process is a child of the server and shows the server's command line
and environment in /proc, its memory contains the server's pages, hashes of strings are salted as in
the server, and warnings of imports are not printed. Tests of such things therefore start cold, and
tests/launch/test_warm.py compares a warm launch with a cold one under each engine, bit for bit.

It works on Linux, for CPU ranks: on a machine with a GPU, CUDA_VISIBLE_DEVICES must be empty.
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[0] = str(HERE.parents[1])
sys.path.append(str(HERE.parents[2] / "scripts"))

from exits import run_command  # noqa: E402
from usage import Parser  # noqa: E402
from warm.server import serve  # noqa: E402
from warm.start import start, stop  # noqa: E402


def main() -> None:
    """Start or stop the server, or be it."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "command",
        choices=["start", "stop", "serve"],
        help="serve: run the server in the foreground; start does that in the background",
    )
    parser.add_argument(
        "folder",
        nargs="?",
        type=Path,
        help="folder of the server's files (default: in the temporary folder)",
    )
    parser.add_argument(
        "owner", nargs="?", type=int, help="for serve: end when this process id ends"
    )
    args = parser.parse_args()
    if args.command == "serve":
        serve(args.folder, args.owner)
    elif args.command == "stop":
        stop(args.folder)
    else:
        try:
            print(start(args.folder))
        except OSError as error:
            sys.exit(f"error: {error}")


if __name__ == "__main__":
    run_command(main)
