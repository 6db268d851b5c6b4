# SPDX-License-Identifier: Apache-2.0
"""Collect in one folder the packages that a machine with a GPU and no network may lack.

    python evidence/gpu_wheels.py                       # runs/gpu_wheels, for Python 3.12
    python evidence/gpu_wheels.py --python_version 3.13 --most_mib 100

The folder holds wheels for Linux x86_64 and stays below --most_mib, so that it is easy to copy.
torch, transformers, accelerate, numpy, pyarrow and their dependencies must be on that machine
already. Versions are those of the environment that runs this script, which the tests use, or the
newest that requirements.txt allows. Two packages need work:

    bitsandbytes   ships a library of several MB for every version of CUDA; only those for --cuda
                   and for the CPU are kept, and the wheel's RECORD is rewritten
    deepspeed      is published as source; it is built here without its compiled ops
                   (DS_BUILD_OPS=0), which makes it pure Python; torch must be installed in the
                   environment that runs this script

To check the wheels, pip installs all of them for the target platform into a temporary folder. The
last line printed is the command that installs them on the other machine.

Exit codes: 0 done, 1 a wheel cannot be fetched or does not fit, 64 usage, 73 cannot write.
"""

import argparse
import re
import sys
from pathlib import Path

import rooms  # noqa: F401  before what it makes importable
from exits import Exit, run_command
from gpu.wheels import PACKAGES, Target, WheelError, collect
from usage import Parser


def parse_args() -> argparse.Namespace:
    """Return the command line."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/gpu_wheels"), help="folder of the wheels"
    )
    parser.add_argument(
        "--python_version", default="3.12", help="Python of the other machine [%(default)s]"
    )
    parser.add_argument(
        "--cuda", default="130", help="its CUDA version, as bitsandbytes spells it [%(default)s]"
    )
    parser.add_argument(
        "--most_mib", type=float, default=60, help="largest size of the folder [%(default)s]"
    )
    parser.add_argument(
        "--packages", nargs="+", default=list(PACKAGES), help=f"default: {' '.join(PACKAGES)}"
    )
    args = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", args.python_version):
        parser.error(f"--python_version {args.python_version}: must be like 3.12")
    if not args.most_mib > 0:
        parser.error(f"--most_mib {args.most_mib}: must be above 0")
    return args


def main() -> int:
    """Fill the folder, and print how to install it; return the exit code."""
    args = parse_args()
    target = Target(args.python_version, args.cuda, args.packages)
    try:
        collect(args.output_dir, target, args.most_mib)
    except WheelError as error:
        print(f"gpu_wheels.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"gpu_wheels.py: cannot write to {args.output_dir}: {error}", file=sys.stderr)
        return Exit.CANNOT_WRITE
    print(
        "On the other machine, in this folder:\n"
        f"python3 -m pip install --no-index --no-deps --target runs/site {args.output_dir}/*.whl "
        "&& export PYTHONPATH=$PWD/runs/site"
    )
    return 0


if __name__ == "__main__":
    run_command(main)
