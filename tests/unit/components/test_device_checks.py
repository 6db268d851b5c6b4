# SPDX-License-Identifier: Apache-2.0
"""What this device cannot do is refused before the start, with the reason and what to use instead.

The tests run in process, with a simulated GPU.
"""

import os
from types import SimpleNamespace

import pytest
import torch

from components import device_checks
from components.checks import find_problems
from components.cli import parse_arguments
from components.device_checks import find_device_problems
from example_arguments import ClassifierArguments, language_model_arguments
from fakes import fake_accelerator

PACKAGES = {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"}
TURING = (7, 5)
AMPERE = (8, 0)
ADA = (8, 9)
HOPPER = (9, 0)
FLASH = ["--attn_implementation", "flash_attention_2"]
HUB_FLASH = ["--attn_implementation", "kernels-community/flash-attn2"]


def accelerator_on(capability, mixed_precision="fp16", **settings):
    """An Accelerator of one process on such a GPU, on a CPU if there is none."""
    device = SimpleNamespace(type="cuda" if capability else "cpu")
    return fake_accelerator(device=device, mixed_precision=mixed_precision, **settings)


@pytest.fixture
def problems_of(monkeypatch):
    """A function from flags, capability, packages, precision and environment to the problems."""

    def find(flags, capability=None, packages=(), mixed_precision=None, **env):
        if mixed_precision is None:
            mixed_precision = "fp16" if capability else "no"  # A CPU has no loss scale
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(device_checks, "is_installed", lambda name: name in packages)
        accelerator = accelerator_on(capability, mixed_precision)
        return find_problems(language_model_arguments(*flags), accelerator)

    return find


@pytest.mark.parametrize(
    ("flags", "capability", "packages", "says"),
    [
        pytest.param(
            ["--attn_implementation", "flash_attention_2"],
            None,
            PACKAGES,
            "needs a GPU: use",
            id="flash attention on a CPU",
        ),
        pytest.param(
            ["--attn_implementation", "flex_attention"],
            None,
            PACKAGES,
            "needs a GPU: use",
            id="flex attention on a CPU",
        ),
        pytest.param(
            ["--attn_implementation", "kernels-community/fa3"],
            None,
            PACKAGES,
            "needs a GPU: use",
            id="a hub kernel on a CPU",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_2"],
            HOPPER,
            set(),
            "pip install flash-attn",
            id="flash attention that is not installed",
        ),
        pytest.param(
            ["--attn_implementation", "kernels-community/flash-attn2"],
            HOPPER,
            set(),
            "pip install kernels",
            id="a hub kernel without the package",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_2"],
            TURING,
            PACKAGES,
            "8.0 or more",
            id="flash attention 2 on Turing",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_4"],
            HOPPER,
            {"flash-attn"},
            "pip install flash-attn-4,",
            id="flash attention 4 without its package",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_4"],
            AMPERE,
            PACKAGES,
            "9.0 or more",
            id="flash attention 4 on Ampere",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_3"],
            AMPERE,
            PACKAGES,
            "9.0 or more",
            id="flash attention 3 on Ampere",
        ),
        pytest.param(
            ["--attn_implementation", "varlne"],
            HOPPER,
            PACKAGES,
            "no attention has this name: did you mean varlen? Available: eager, flash",
            id="an attention that nobody knows",
        ),
        pytest.param(
            ["--attn_implementation", "varlen"],
            None,
            PACKAGES,
            "needs an NVIDIA GPU",
            id="varlen on a CPU",
        ),
        pytest.param(
            ["--attn_implementation", "varlen", "--dtype", "float16", "--use_peft"],
            TURING,
            PACKAGES,
            "8.0 or more",
            id="varlen on Turing",
        ),
        pytest.param(
            ["--use_liger_kernel"], None, PACKAGES, "Triton kernels need a GPU", id="Liger on a CPU"
        ),
        pytest.param(
            ["--use_liger_kernel"],
            HOPPER,
            set(),
            "pip install liger-kernel",
            id="Liger that is not installed",
        ),
        pytest.param(["--tf32"], None, PACKAGES, "compute capability 8.0", id="TF32 on a CPU"),
        pytest.param(["--tf32"], TURING, PACKAGES, "compute capability 8.0", id="TF32 on Turing"),
        pytest.param(
            ["--dtype", "bfloat16"],
            AMPERE,
            set(),
            "use --dtype float32",
            id="bf16 weights without a master copy",
        ),
        pytest.param(
            ["--no_master_weights"],
            AMPERE,
            set(),
            "it changes nothing",
            id="no master copy of what has one",
        ),
        pytest.param(
            ["--optim", "paged_adamw_8bit"],
            None,
            PACKAGES,
            "adamw_8bit or adamw_torch_fused",
            id="paging without a GPU",
        ),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(flags, capability, packages, says, problems_of):
    found = problems_of(flags, capability, packages)
    assert len(found) == 1 and says in found[0] and found[0].startswith(flags[0]), found


@pytest.mark.parametrize(
    ("flags", "capability", "packages"),
    [
        pytest.param([], None, set(), id="nothing"),
        pytest.param(
            ["--attn_implementation", "flash_attention_2", "--packing"],
            AMPERE,
            {"flash-attn"},
            id="flash attention 2",
        ),
        pytest.param(
            ["--attn_implementation", "flash_attention_3"],
            HOPPER,
            {"flash-attn-3"},
            id="flash attention 3",
        ),
        pytest.param(
            ["--attn_implementation", "kernels-community/flash-attn2"],
            AMPERE,
            {"kernels"},
            id="a hub kernel",
        ),
        pytest.param(
            ["--use_liger_kernel", "--tf32", "--attn_implementation", "flex_attention"],
            ADA,
            PACKAGES,
            id="Liger, TF32, flex",
        ),
        pytest.param(["--packing"], None, set(), id="packing"),
        pytest.param(
            ["--dtype", "bfloat16", "--no_master_weights"],
            AMPERE,
            set(),
            id="bf16 weights whose loss of updates is asked for",
        ),
        pytest.param(
            ["--dtype", "bfloat16", "--use_peft"], AMPERE, set(), id="adapters on bf16 weights"
        ),
        pytest.param(
            ["--attn_implementation", "varlen", "--dtype", "bfloat16", "--use_peft", "--packing"],
            AMPERE,
            set(),
            id="varlen",
        ),
        pytest.param(
            ["--padding_free", "--train_sampling_strategy", "group_by_length"],
            None,
            set(),
            id="padding free, by length",
        ),
    ],
)
def test_what_can_run_is_not(flags, capability, packages, problems_of):
    assert problems_of(flags, capability, packages) == []


def test_a_package_is_one_that_pip_knows():
    assert device_checks.is_installed("torch") and not device_checks.is_installed("no-such-package")


def test_varlen_is_refused_for_what_is_no_causal_language_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    args = parse_arguments(ClassifierArguments, words=["--attn_implementation", "varlen"])
    (problem,) = find_device_problems(args, accelerator_on(HOPPER))
    assert "is for the recipes of causal language models: use sdpa" in problem


def test_varlen_is_refused_with_an_older_torch(problems_of, monkeypatch):
    monkeypatch.setattr(device_checks.varlen, "is_available", lambda: False)
    (problem,) = problems_of(["--attn_implementation", "varlen"], HOPPER)
    assert "needs torch 2.11 or newer" in problem


@pytest.mark.parametrize(
    ("capability", "flags", "says"),
    [
        (None, [], "8.9 (Ada, Hopper) or more"),
        (AMPERE, [], "8.9 (Ada, Hopper) or more"),
        (HOPPER, ["--use_peft"], "whole weights only"),
        (HOPPER, [], None),
    ],
)
def test_fp8_is_for_what_has_it(capability, flags, says, problems_of):
    found = problems_of(flags, capability, ACCELERATE_MIXED_PRECISION="fp8")
    if says is None:
        assert found == []
    else:
        assert len(found) == 1 and says in found[0]


@pytest.mark.parametrize(("backend", "refused"), [("TE", True), ("AO", False)])
def test_fp8_is_refused_where_it_replaces_the_output_head(backend, refused, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: HOPPER)
    accelerator = accelerator_on(HOPPER, fp8_backend=backend)
    found = list(find_device_problems(language_model_arguments(), accelerator))
    assert len(found) == refused and all("use backend: AO" in problem for problem in found)


@pytest.mark.parametrize(
    ("flags", "capability", "mixed_precision", "says"),
    [
        ([], TURING, "bf16", "(compute capability 7.5) has no bf16 hardware"),
        (["--use_peft", "--load_in_4bit"], TURING, "bf16", "pass --mixed_precision fp16"),
        (["--use_peft", "--dtype", "bfloat16"], TURING, "no", "use --dtype float32"),
        (["--use_peft", "--dtype", "bfloat16"], TURING, "fp16", None),  # multiplies in fp16
        ([], TURING, "fp16", None),
        ([], TURING, "no", None),
        ([], AMPERE, "bf16", None),
        ([], None, "bf16", None),  # a CPU, in a rehearsal
        (FLASH, AMPERE, "no", "in bf16 and fp16 only: pass --mixed_precision bf16"),
        (HUB_FLASH, AMPERE, "no", "in bf16 and fp16 only"),
        (["--attn_implementation", "varlen"], AMPERE, "no", "launch with --mixed_precision bf16"),
        (FLASH, AMPERE, "bf16", None),
        ([*FLASH, "--use_peft", "--dtype", "bfloat16"], AMPERE, "no", None),
        (["--attn_implementation", "flex_attention"], AMPERE, "no", None),
    ],
)
def test_what_the_hardware_or_kernel_cannot_compute_in_is_refused(
    flags, capability, mixed_precision, says, problems_of
):
    found = problems_of(flags, capability, PACKAGES, mixed_precision)
    if says:
        assert len(found) == 1 and says in found[0]
    else:
        assert found == []


def test_bf16_is_not_refused_by_the_numbers_of_amds_gpus(problems_of, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert problems_of([], (7, 0), mixed_precision="bf16") == []


@pytest.mark.parametrize("is_there", [True, False])
def test_compiling_on_a_cpu_needs_a_compiler(is_there, problems_of, monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if is_there else os.devnull)
    found = problems_of(["--torch_compile"])
    assert len(found) == (not is_there)
    assert all("put a compiler" in problem for problem in found)
