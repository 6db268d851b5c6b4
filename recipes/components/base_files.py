# SPDX-License-Identifier: Apache-2.0
"""The fingerprint of a pretrained model's weights, by which a base can be recognized later.

Adapters belong to the weights that they were trained on. A folder may be overwritten, and a branch
on the hub may move. Then other weights have the same name and the same shapes.
"""

import hashlib
from pathlib import Path

from transformers.utils import cached_file

PATTERN = "model*.safetensors"
SAMPLES = 64  # places of a file that are read: reading all of a large one would take minutes
SAMPLE_BYTES = 4096


def fingerprint_of_weights(name: str, revision: str) -> str | None:
    """Return the fingerprint of the safetensors files of a model, 64 hexadecimal digits.

    It is made of the names and sizes of the files, and of samples of their content. None if there
    are no such files on this machine.

    Args:
        name: folder, or hub id of a model that was downloaded before.
        revision: on the hub.
    """
    folder = find_folder(name, revision)
    if folder is None:
        return None
    digest = hashlib.sha256()
    paths = sorted(folder.glob(PATTERN))
    for path in paths:
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        for sample in read_samples(path):
            digest.update(sample)
    return digest.hexdigest() if paths else None


def find_folder(name: str, revision: str) -> Path | None:
    """Return the folder with a model's files, also that of the hub's cache; None without one."""
    if Path(name).is_dir():
        return Path(name)
    try:
        config = cached_file(name, "config.json", revision=revision, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if config is None else Path(config).parent


def read_samples(path: Path) -> list[bytes]:
    """Return parts of a file at even distances, with its start and its end."""
    size = path.stat().st_size
    last = max(size - SAMPLE_BYTES, 0)
    samples = []
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(last * number // (SAMPLES - 1))
            samples.append(file.read(SAMPLE_BYTES))
    return samples
