# SPDX-License-Identifier: Apache-2.0
"""Wheels for a machine with a GPU and no network: fetched or built, trimmed, and checked."""

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from paths import ROOT

MIB = 2**20
# Other dependencies (numpy, pyarrow, torch, ...) are expected on the other machine. Most machines
# have some version of transformers, but the recipes need the one that they are tested with.
PACKAGES = (
    "transformers",
    "tokenizers",
    "huggingface_hub",
    "hf-xet",
    "httpx2",
    "httpcore2",
    "truststore",
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
# pip compares tags literally, so that every glibc version that packages are built for is listed.
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
    """A wheel cannot be fetched or built, or does not fit; the message says which and why."""


@dataclass(frozen=True)
class Target:
    """The other machine, and the packages that it lacks."""

    python_version: str  # e.g. 3.12
    cuda: str  # as bitsandbytes spells it, e.g. 130
    packages: Sequence[str] = PACKAGES


def version_wanted(package: str) -> str:
    """Return the requirement to pass to pip.

    It names the installed version, or the range of requirements.txt, or neither. The local part of
    a version (+cpu) is left out, since an index does not have it.
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


def pip(*words: object, **variables: str) -> None:
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


def target_options(python_version: str) -> list[str]:
    """Return pip's options that choose wheels for the other machine instead of this one."""
    options = ["--only-binary=:all:", "--implementation", "cp", "--python-version", python_version]
    for platform in PLATFORMS:
        options += ["--platform", platform]
    return options


def fetch(package: str, folder: Path, python_version: str) -> Path:
    """Download, or build, the wheel of one package into `folder`; return its path.

    Raises WheelError if pip fails or leaves no wheel, or if a built one has compiled parts.
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
            f"{found[0].name}: has parts compiled for this machine, and may not work on another"
        )
    return found[0]


def record_line(name: str, content: bytes) -> list[str]:
    """Return one line of a wheel's RECORD (PEP 376, PEP 427).

    It has the path, the sha256 in base64 without padding, and the size.
    """
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    digest = digest.rstrip(b"=").decode()
    return [name, f"sha256={digest}", str(len(content))]


def repack(wheel: Path, keep: Callable[[str], bool]) -> None:
    """Rewrite a wheel with the files for which keep(name) is true, and their RECORD."""
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
        # The specification recommends it at the end of the archive.
        new.writestr(record, lines.getvalue())


def trim_bitsandbytes(wheel: Path, cuda: str) -> None:
    """Keep the compiled libraries of bitsandbytes for one CUDA version and for the CPU only.

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


def check_record(wheel: Path) -> None:
    """Raise WheelError unless a wheel's RECORD matches the files of the archive."""
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


def check_install(folder: Path, python_version: str) -> int:
    """Install all wheels for the target platform into a temporary folder; return the bytes there.

    Raises WheelError if pip does not accept one.
    """
    with tempfile.TemporaryDirectory() as target:
        wheels = sorted(folder.glob("*.whl"))
        options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--target", target]
        pip("install", *options, *target_options(python_version), *wheels)
        files = [path for path in Path(target).rglob("*") if path.is_file()]
        return sum(path.stat().st_size for path in files)


def collect(folder: Path, target: Target, most_mib: float) -> None:
    """Fetch all packages into a folder, print their sizes, and check them.

    Wheels of an earlier call are deleted. Raises WheelError if a wheel does not fit, or if together
    they are larger than `most_mib`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.whl"):
        path.unlink()
    for package in target.packages:
        wheel = fetch(package, folder, target.python_version)
        if package == "bitsandbytes":
            trim_bitsandbytes(wheel, target.cuda)
            check_record(wheel)
        print(f"{wheel.stat().st_size / MIB:7.2f} MiB  {wheel.name}", flush=True)
    total = sum(path.stat().st_size for path in folder.glob("*.whl"))
    installed = check_install(folder, target.python_version)
    print(
        f"{total / MIB:7.2f} MiB  in all, {installed / MIB:.0f} MiB installed; pip accepts "
        f"each for Python {target.python_version}"
    )
    if total > most_mib * MIB:
        raise WheelError(
            f"the folder has {total / MIB:.1f} MiB, more than --most_mib {most_mib:g}: "
            "leave out what the other machine has, with --packages"
        )
