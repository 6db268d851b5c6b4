"""Workarounds for faults of other libraries: what is wrong, in which version it was seen, and what is done until then.

tests/static/test_upstream.py shows each fault as it is without the workaround: where it is mended, that test fails and
the workaround can go. A recipe imports this file before all that takes seconds to import.
"""

import contextlib
import functools


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
