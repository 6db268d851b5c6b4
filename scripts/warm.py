"""Warm starts: processes that have imported torch and its friends before they are asked for.

    python scripts/rehearse.py --warm --config_file YAML recipes/llama.py ...
    python scripts/warm.py start     # print the name of a program that is used as `python` is
    python scripts/warm.py stop

Half of the time of a short launch is imports, in each of its processes again. A server imports the
libraries once and forks a process for each request. That process is what `python SCRIPT ...` or
`python -m MODULE ...` would have been, with the same arguments, environment, folder, limits and
streams, and its own children start warm too, since its sys.executable is the program above. No file
of this project is imported before a process asks for it: an edit counts at once.

A start falls back to the interpreter itself, and says why, where it would differ: a variable that
the libraries read while they were imported has another value, or the server is gone. What differs
all the same: the process is a child of the server and has the server's command line and environment
in /proc, its memory contains the server's pages, hashes of texts are salted as the server's are,
and warnings of imports are not printed. So tests of such things start cold, and
tests/launch/test_warm.py compares a warm with a cold launch under each engine, bit for bit.

For Linux, and for CPU ranks: where there is a GPU, CUDA_VISIBLE_DEVICES has to be empty.
"""

import argparse
import sys
from pathlib import Path

from proof.warm_server import serve
from proof.warm_start import start, stop


def main() -> None:
    """Start, stop or be the server."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["start", "stop", "serve"])
    parser.add_argument(
        "folder", nargs="?", type=Path, help="of the server (default: in the temporary folder)"
    )
    parser.add_argument(
        "owner", nargs="?", type=int, help="serve: a process with which the server ends"
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
    main()
