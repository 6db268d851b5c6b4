# SPDX-License-Identifier: Apache-2.0
"""Packed and padding-free rows do not see each other, under any attention."""

import sys
from pathlib import Path
from xml.etree import ElementTree

from . import launches
from .cell import Outcome, Setup
from .comparisons import compare
from .launches import Variant, job, only_on_gpu

MASK_TESTS = "tests/gpu/test_masks_on_gpu.py"
BATCHES = {
    "packed": ("--packing", "--max_length", "128"),
    "padding-free": ("--padding_free",),
}
ON_A_CPU = ("eager", "sdpa")
NEEDS = {"flash_attention_2": ("flash-attn",)}


def documents(setup: Setup) -> Outcome:
    """Run the test that logits of packed documents do not depend on their neighbors."""
    return run_tests(setup, MASK_TESTS)


def run_tests(setup: Setup, path: str | Path) -> Outcome:
    """Run a file of tests; one row per test, ok if some passed and none failed.

    Raises RuntimeError if pytest does not report.
    """
    report = setup.work / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"]
    command += [str(report), str(path)]
    done = launches.finish(command, timeout=max(setup.seconds_left(), 1))
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report: {launches.error_of(done.output)}")
    cases = ElementTree.parse(report).iter("testcase")
    rows = [{"test": case.get("name"), "result": result_of(case)} for case in cases]
    passed = any(row["result"] == "passed" for row in rows)
    broken = any(row["result"].startswith(("failure", "error")) for row in rows)
    return Outcome(rows, passed and not broken, [launches.printable(command, setup)])


def result_of(case: ElementTree.Element) -> str:
    """Return how a test of a JUnit report ended, with the first line of the reason."""
    result = "passed"
    for kind in ("skipped", "failure", "error"):
        found = case.find(kind)
        if found is not None:
            message = found.get("message") or ""
            result = f"{kind}: {message.splitlines()[0][:200]}"
    return result


def packed_rows(setup: Setup) -> Outcome:
    """Compare the loss of each attention with that of eager attention, without padding."""
    kernels = ("eager", "sdpa", "flex_attention", "varlen", "flash_attention_2")
    outcome = Outcome(ok=True)
    for name, flags in BATCHES.items():
        variants = [attention_variant(setup, name, kernel, flags) for kernel in kernels]
        trained = launches.train_all(setup, variants, launches.tiny_model(setup))
        compare(outcome, trained, trained[0])
        setup.keep(outcome)
    return outcome


def attention_variant(setup: Setup, name: str, kernel: str, flags: tuple[str, ...] = ()) -> Variant:
    """Return a variant with one attention; kernels for GPUs are left out on a CPU."""
    return Variant(
        f"{name}, {kernel}",
        flags=job(setup, "--attn_implementation", kernel, *flags),
        left_out="" if kernel in ON_A_CPU else only_on_gpu(setup),
        needs=NEEDS.get(kernel, ()),
    )
