"""What libraries import at the start, in a process of its own, without a workaround and with it.

The other workarounds are in tests/unit/components/test_upstream.py.
"""

import sys

from harm import shows_harm_without
from launching import REPO, run

USE_ADAPTERS = """
import peft
import sys
print("compiler", "torch._inductor.compile_fx" in sys.modules)
"""
UNWRAP_A_MODEL = """
import sys
import torch
from accelerate.utils.other import extract_model_from_parallel
model = torch.nn.Linear(1, 1)
assert extract_model_from_parallel(model) is model
print("deepspeed", "deepspeed" in sys.modules)
"""


def output_of(program, workaround, cured):
    """What a program prints that calls the workaround first, or does not."""
    first = "import sys; sys.path.append('recipes'); from components import upstream\n"
    if cured:
        first += f"upstream.{workaround}()\n"
    done = run(sys.executable, "-c", first + program, cwd=REPO)
    assert done.returncode == 0, done.output
    return done.output


@shows_harm_without("import_bitsandbytes_uncompiled")
def test_bitsandbytes_imports_the_compiler(cured):
    output = output_of(USE_ADAPTERS, "import_bitsandbytes_uncompiled", cured)
    assert f"compiler {not cured}" in output


@shows_harm_without("ask_for_deepspeed_without_importing_it")
def test_accelerate_imports_deepspeed_to_unwrap_a_model(cured):
    output = output_of(UNWRAP_A_MODEL, "ask_for_deepspeed_without_importing_it", cured)
    assert f"deepspeed {not cured}" in output
