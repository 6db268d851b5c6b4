# SPDX-License-Identifier: Apache-2.0
"""What tests of merged folders do with them."""

import json

from safetensors.torch import load_file, save_file


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path, change):
    """Call a function with {name: tensor} of a file, and write what it makes of them."""
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, {"format": "pt"})
