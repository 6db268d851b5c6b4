"""Each workaround of recipes/upstream.py, and the fault that it is for, as the library has it today."""

import sys

import pytest
import torch
import upstream
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
START_FASTER = "import sys; sys.path.append('recipes'); import upstream; upstream.start_faster()"


@pytest.mark.parametrize(("first", "imported"), [("", True), (START_FASTER, False)], ids=["without", "with"])
def test_bitsandbytes_imports_the_compiler_and_accelerate_deepspeed(first, imported):
    done = run(sys.executable, "-c", first + USE, cwd=REPO)
    assert done.returncode == 0, done.output
    assert f"compiler {imported}" in done.output and f"deepspeed {imported}" in done.output


def test_where_deepspeed_is_there_its_engine_is_unwrapped_as_ever(monkeypatch):
    from accelerate.utils import other

    monkeypatch.setattr(other, "is_deepspeed_available", lambda: True)
    upstream.ask_for_deepspeed_without_importing_it()
    monkeypatch.setitem(sys.modules, "deepspeed", None)  # somebody has imported it
    assert other.is_deepspeed_available()
    monkeypatch.delitem(sys.modules, "deepspeed")
    assert not other.is_deepspeed_available()


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
