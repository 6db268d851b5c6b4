# SPDX-License-Identifier: Apache-2.0
"""A small bitsandbytes, to be trimmed."""

import zipfile

from gpu import wheels

LIBRARIES = ("libbitsandbytes_cuda130.so", "libbitsandbytes_cuda118.so", "libbitsandbytes_cpu.so")
INFO = "bitsandbytes-1.0.dist-info"
RECORD = f"{INFO}/RECORD"
WHEEL_FILE = b"Wheel-Version: 1.0\nGenerator: a test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
FILES = {
    "bitsandbytes/__init__.py": b"name = 'trimmed'\n",
    f"{INFO}/METADATA": b"Metadata-Version: 2.1\nName: bitsandbytes\nVersion: 1.0\n",
    f"{INFO}/WHEEL": WHEEL_FILE,
}


def make_wheel(folder, libraries=LIBRARIES):
    """A small bitsandbytes, as an index would have it."""
    wheel = folder / "bitsandbytes-1.0-py3-none-any.whl"
    files = FILES | {f"bitsandbytes/{name}": name.encode() * 100 for name in libraries}
    record = [",".join(wheels.record_line(name, content)) for name, content in files.items()]
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
        archive.writestr(RECORD, "\n".join([*record, f"{RECORD},,"]) + "\n")
    return wheel
