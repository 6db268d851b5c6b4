"""Workarounds for faults of other libraries: what is wrong, in which version it was seen, and what is done until then.

tests/launch/test_upstream.py shows each fault as it is without the workaround: where it is mended, that test fails and
the workaround can go. A recipe imports this file before all that takes seconds to import.
"""

import contextlib
import functools
import sys


def start_faster():
    """Have the libraries import less than they would. To be called before any of them is imported."""
    import_bitsandbytes()
    ask_for_deepspeed_without_importing_it()


def import_bitsandbytes():
    """Import bitsandbytes, if it is installed, without torch's compiler.

    bitsandbytes 0.50 calls torch.compile while it is imported (backends/default/ops.py), which imports
    torch._inductor: half a second of each start, since peft imports bitsandbytes and transformers' schedules import
    peft. Here its functions are compiled when they are first called.
    """
    with compiling_at_first_call(), contextlib.suppress(ImportError):
        import bitsandbytes  # noqa: F401


@contextlib.contextmanager
def compiling_at_first_call():
    """Let torch.compile return functions that it compiles when they are first called."""
    import torch

    compile_at_once = torch.compile

    def compile_later(function=None, **options):
        if function is None:
            return functools.partial(compile_later, **options)

        @functools.cache
        def compiled():
            return compile_at_once(function, **options)

        @functools.wraps(function)
        def call(*args, **kwargs):
            return compiled()(*args, **kwargs)

        return call

    torch.compile = compile_later
    try:
        yield
    finally:
        torch.compile = compile_at_once


def ask_for_deepspeed_without_importing_it():
    """Let accelerate unwrap a model without importing deepspeed, which takes up to a second at the end of each run.

    accelerate 1.15 imports it to ask whether a model is DeepSpeed's engine (extract_model_from_parallel in
    utils/other.py). No model is, as long as nobody has imported it.
    """
    from accelerate.utils import other

    is_installed = other.is_deepspeed_available
    other.is_deepspeed_available = lambda: "deepspeed" in sys.modules and is_installed()
