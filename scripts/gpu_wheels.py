"""Put together, in one folder, the packages that a machine with a GPU and no network may lack.

    python scripts/gpu_wheels.py                       # runs/gpu_wheels, for Python 3.12
    python scripts/gpu_wheels.py --python_version 3.13 --most_mib 100

The folder holds wheels for Linux x86_64 and stays below --most_mib, so that it can be carried
along. torch, transformers, accelerate, numpy, pyarrow and what they need have to be on that machine
already. Versions are those of the environment that runs this script, which the tests use, or the
newest that requirements.txt allows. Two packages need work:

    bitsandbytes   brings a library of several MB for every version of CUDA; only those for --cuda
                   and for the CPU stay, and the wheel's RECORD is written anew
    deepspeed      is published as source; it is built here without its compiled ops
                   (DS_BUILD_OPS=0), which makes it pure Python; torch must be installed in the
                   environment that runs this script

Every wheel is then installed with pip for the target platform into a temporary folder, which fails
if one does not fit. The last line printed is the command that installs the folder on the other
machine.

Exit codes: 0 done, 1 a wheel could not be had or does not fit, 64 usage, 73 cannot write.
"""

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from usage import Parser

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
CANNOT_WRITE = 73
# What pip would add by itself (numpy, pyarrow, torch, ...) is expected on the other machine.
PACKAGES = (
    "bitsandbytes",
    "deepspeed",
    "pandas",
    "datasets",
    "peft",
    "liger-kernel",
    "dill",
    "multiprocess",
    "xxhash",
    "psutil",
    "hjson",
    "py-cpuinfo",
    "rouge_score",
    "absl-py",
    "nltk",
    "defusedxml",
    "trl",
    "pydantic",
    "pydantic-core",
    "annotated-types",
    "typing-inspection",
    "typing-extensions",
    "einops",
    "msgpack",
    "ninja",
    "sacrebleu",
    "portalocker",
    "tabulate",
    "colorama",
)
BUILT_HERE = ("deepspeed", "rouge_score")  # published as source only
# pip compares tags literally, so every glibc version that packages are built for is named.
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_27_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
    "manylinux_2_12_x86_64",
    "manylinux2010_x86_64",
    "manylinux_2_5_x86_64",
    "manylinux1_x86_64",
)


class WheelError(Exception):
    """A wheel that cannot be had, or does not fit; the message says which and why."""


def version_wanted(package):
    """Return the requirement to ask pip for.

    It names the installed version, else the range of requirements.txt, else none. A local part of
    a version (+cpu) is left out, since an index does not know it.
    """
    try:
        return f"{package}=={importlib.metadata.version(package).split('+')[0]}"
    except importlib.metadata.PackageNotFoundError:
        pass
    for line in (ROOT / "requirements.txt").read_text().splitlines():
        requirement = line.split("#")[0].strip()
        if re.match(rf"{re.escape(package)}\b", requirement):
            return requirement
    return package


def pip(*words, **variables):
    """Run pip of this environment with more environment variables.

    Raises WheelError with the last lines of its output if it fails.
    """
    command = [sys.executable, "-m", "pip", *[str(word) for word in words]]
    done = subprocess.run(
        command,
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        last_lines = "\n".join(done.stdout.strip().splitlines()[-5:])
        raise WheelError(f"pip {' '.join(command[3:])}\n{last_lines}")


def target_options(python_version):
    """Return pip's options that choose wheels for the other machine instead of this one."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    return options


def fetch(package, folder, python_version):
    """Download, or build, the wheel of one package into `folder`; return its path.

    Raises WheelError if pip fails or leaves none, or if a built one holds compiled parts.
    """
    before = set(folder.glob("*.whl"))
    requirement = version_wanted(package)
    if package in BUILT_HERE:
        # Built in this environment, since deepspeed's setup.py imports torch
        options = ["--no-deps", "--no-build-isolation", "--wheel-dir", folder]
        pip("wheel", *options, requirement, DS_BUILD_OPS="0")
    else:
        pip("download", "--no-deps", "--dest", folder, *target_options(python_version), requirement)
    found = sorted(set(folder.glob("*.whl")) - before)
    if len(found) != 1:
        raise WheelError(f"{requirement}: pip left {len(found)} wheels instead of one")
    if package in BUILT_HERE and not found[0].name.endswith("-none-any.whl"):
        raise WheelError(
            f"{found[0].name}: has parts compiled for this machine, so it cannot be carried"
        )
    return found[0]


def record_line(name, content):
    """Return one line of a wheel's RECORD (PEP 376, PEP 427).

    It has the path, the sha256 in base64 without padding, and the size.
    """
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    digest = digest.rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(content))]


def repack(wheel, keep):
    """Rewrite a wheel with those of its files that keep(name) is true for, and their RECORD."""
    contents = {}
    with zipfile.ZipFile(wheel) as old:
        for entry in old.infolist():
            if not entry.is_dir():
                contents[entry.filename] = old.read(entry)
    record = next(name for name in contents if name.endswith(".dist-info/RECORD"))
    del contents[record]
    kept = {name: content for name, content in contents.items() if keep(name)}
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    for name, content in kept.items():
        writer.writerow(record_line(name, content))
    writer.writerow([record, "", ""])
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as new:
        for name, content in kept.items():
            new.writestr(name, content)
        # The specification asks for it at the end of the archive
        new.writestr(record, lines.getvalue())


def trim_bitsandbytes(wheel, cuda):
    """Keep the compiled libraries of bitsandbytes for one CUDA version and for the CPU alone.

    Raises WheelError if the wheel lacks one of them.
    """
    wanted = {f"libbitsandbytes_cuda{cuda}.so", "libbitsandbytes_cpu.so"}
    with zipfile.ZipFile(wheel) as archive:
        libraries = {Path(name).name for name in archive.namelist() if name.endswith(".so")}
    missing = wanted - libraries
    if missing:
        lacking = ", ".join(sorted(missing))
        present = ", ".join(sorted(libraries))
        raise WheelError(f"{wheel.name} has no {lacking}, only {present}")
    repack(wheel, lambda name: not name.endswith(".so") or Path(name).name in wanted)


def check_record(wheel):
    """Raise WheelError unless a wheel's RECORD lists the files of the archive as they are."""
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        record = next(name for name in names if name.endswith(".dist-info/RECORD"))
        text = archive.read(record).decode()
        lines = list(csv.reader(io.StringIO(text)))
        listed = {line[0] for line in lines}
        if listed != names:
            differing = sorted(listed ^ names)
            raise WheelError(f"{wheel.name}: RECORD and archive differ in {differing[:3]}")
        for line in lines:
            name = line[0]
            if name != record and line != record_line(name, archive.read(name)):
                raise WheelError(f"{wheel.name}: RECORD has another hash or size of {name}")


def check_install(folder, python_version):
    """Install all wheels for the target platform into a temporary folder; return the bytes there.

    Raises WheelError if pip does not accept one.
    """
    with tempfile.TemporaryDirectory() as target:
        wheels = sorted(folder.glob("*.whl"))
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", target]
        pip("install", *options, *target_options(python_version), *wheels)
        files = [path for path in Path(target).rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)


def parse_args():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output_dir", type=Path, default=Path("runs/gpu_wheels"), help="folder of the wheels"
    )
    parser.add_argument(
        "--python_version", default="3.12", help="of the other machine [%(default)s]"
    )
    parser.add_argument(
        "--cuda", default="130", help="its CUDA version as bitsandbytes writes it [%(default)s]"
    )
    parser.add_argument(
        "--most_mib", type=float, default=60, help="largest size of the folder [%(default)s]"
    )
    parser.add_argument(
        "--packages", nargs="+", default=list(PACKAGES), help="to fetch [all that may be missing]"
    )
    args = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", args.python_version):
        parser.error(f"--python_version {args.python_version}: must be like 3.12")
    if not args.most_mib > 0:
        parser.error(f"--most_mib {args.most_mib}: must be above 0")
    return args


def collect(args):
    """Fetch all packages, print their sizes, and check them; raises WheelError."""
    args.output_dir.mkdir(parents=True, exist_ok=True)
    for path in args.output_dir.glob("*.whl"):  # of an earlier call
        path.unlink()
    for package in args.packages:
        wheel = fetch(package, args.output_dir, args.python_version)
        if package == "bitsandbytes":
            trim_bitsandbytes(wheel, args.cuda)
            check_record(wheel)
        print(f"{wheel.stat().st_size / MIB:7.2f} MiB  {wheel.name}", flush=True)
    total = sum(path.stat().st_size for path in args.output_dir.glob("*.whl"))
    installed = check_install(args.output_dir, args.python_version)
    print(
        f"{total / MIB:7.2f} MiB  in all, {installed / MIB:.0f} MiB installed; pip accepts "
        f"each for Python {args.python_version}"
    )
    if total > args.most_mib * MIB:
        raise WheelError(
            f"the folder has {total / MIB:.1f} MiB, more than --most_mib {args.most_mib:g}: "
            "leave out what the other machine has, with --packages"
        )


def main():
    args = parse_args()
    try:
        collect(args)
    except WheelError as error:
        print(f"gpu_wheels.py: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"gpu_wheels.py: cannot write to {args.output_dir}: {error}", file=sys.stderr)
        return CANNOT_WRITE
    print(
        "On the other machine, in this folder:\n"
        f"python3 -m pip install --no-index --no-deps --target runs/site {args.output_dir}/*.whl "
        "&& export PYTHONPATH=$PWD/runs/site"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
