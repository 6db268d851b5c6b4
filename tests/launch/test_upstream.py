"""Each workaround at the start, of recipes/components/upstream.py, against the fault that it is for, as the library has it today."""

import sys

import pytest

from launching import REPO, run

# What a recipe does with these libraries, and whether that imported torch's compiler and deepspeed
USE = """
import sys
import torch
import peft
print("compiler", "torch._inductor.compile_fx" in sys.modules)
from accelerate.utils.other import extract_model_from_parallel
model = torch.nn.Linear(1, 1)
assert extract_model_from_parallel(model) is model
print("deepspeed", "deepspeed" in sys.modules)
"""
START_FASTER = "import sys; sys.path.append('recipes'); from components import upstream; upstream.start_faster()"


@pytest.mark.parametrize(
    ("first", "imported"), [("", True), (START_FASTER, False)], ids=["without", "with"]
)
def test_bitsandbytes_imports_the_compiler_and_accelerate_deepspeed(first, imported):
    done = run(sys.executable, "-c", first + USE, cwd=REPO)
    assert done.returncode == 0, done.output
    assert f"compiler {imported}" in done.output and f"deepspeed {imported}" in done.output
