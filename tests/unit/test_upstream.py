"""What the workarounds of components/upstream.py change, and what they leave as it is."""

import sys

import torch

from components import upstream


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
