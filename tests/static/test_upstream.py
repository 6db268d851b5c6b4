"""Each workaround of recipes/upstream.py, and the fault that it is for, as the library has it today."""

import sys

import pytest
import torch
import upstream
from launching import REPO, run

COMPILER = "torch._inductor.compile_fx"


@pytest.mark.parametrize(("imports", "compiler"), [
    ("import bitsandbytes", True), ("import upstream; upstream.start_faster(); import peft", False),
], ids=["by itself", "by the workaround"])
def test_bitsandbytes_imports_the_compiler(imports, compiler):
    code = f"import sys; sys.path.append('recipes'); {imports}; print('{COMPILER}' in sys.modules)"
    done = run(sys.executable, "-c", code, cwd=REPO)
    assert done.returncode == 0 and done.output.endswith(f"{compiler}\n"), done.output


def test_a_function_is_compiled_once_and_when_it_is_called(monkeypatch):
    compiled = []

    def compile_at_once(function, **options):
        compiled.append((function.__name__, options))
        return function

    monkeypatch.setattr(torch, "compile", compile_at_once)
    with upstream.compiling_at_first_call():

        @torch.compile(dynamic=False)
        def double(number):
            return 2 * number

    assert compiled == [] and torch.compile is compile_at_once
    assert [double(2), double(3)] == [4, 6] and compiled == [("double", {"dynamic": False})]


@pytest.mark.parametrize(("imports", "deepspeed"), [
    ("", True), ("import upstream; upstream.start_faster()", False),
    ("import deepspeed, upstream; upstream.start_faster()", True),
], ids=["by itself", "by the workaround", "where it is there"])
def test_accelerate_imports_deepspeed_to_unwrap_a_model(imports, deepspeed):
    code = (f"import sys; sys.path.append('recipes'); {imports}\nimport torch\n"
            "from accelerate.utils.other import extract_model_from_parallel\nmodel = torch.nn.Linear(1, 1)\n"
            "assert extract_model_from_parallel(model) is model\nprint('deepspeed' in sys.modules)")
    done = run(sys.executable, "-c", code, cwd=REPO)
    assert done.returncode == 0 and done.output.endswith(f"{deepspeed}\n"), done.output
