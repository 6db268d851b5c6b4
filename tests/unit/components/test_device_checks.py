"""What this device cannot do is refused before the start, with the reason and what to use instead.

In process, with a GPU that is only told of.
"""

import importlib.metadata
import os
from types import SimpleNamespace

import pytest
import torch
from components import device_checks
from components.checks import find_problems
from components.cli import parse_arguments
from components.device_checks import find_device_problems
from example_arguments import ClassifierArguments, language_model_arguments

PACKAGES = {"flash-attn", "flash-attn-3", "flash-attn-4", "kernels", "liger-kernel"}
AMPERE, ADA, HOPPER, TURING = (8, 0), (8, 9), (9, 0), (7, 5)
REFUSED = {  # flags, capability of the GPU or None for a CPU, packages that are there: what is said
    "flash attention on a CPU": (
        ["--attn_implementation", "flash_attention_2"],
        None,
        PACKAGES,
        "needs a GPU: use",
    ),
    "flex attention on a CPU": (
        ["--attn_implementation", "flex_attention"],
        None,
        PACKAGES,
        "needs a GPU: use",
    ),
    "a hub kernel on a CPU": (
        ["--attn_implementation", "kernels-community/fa3"],
        None,
        PACKAGES,
        "needs a GPU: use",
    ),
    "flash attention that is not installed": (
        ["--attn_implementation", "flash_attention_2"],
        HOPPER,
        set(),
        "pip install flash-attn",
    ),
    "a hub kernel without the package": (
        ["--attn_implementation", "kernels-community/flash-attn2"],
        HOPPER,
        set(),
        "pip install kernels",
    ),
    "flash attention 2 on Turing": (
        ["--attn_implementation", "flash_attention_2"],
        TURING,
        PACKAGES,
        "8.0 or more",
    ),
    "flash attention 4 without its package": (
        ["--attn_implementation", "flash_attention_4"],
        HOPPER,
        {"flash-attn"},
        "pip install flash-attn-4,",
    ),
    "flash attention 4 on Ampere": (
        ["--attn_implementation", "flash_attention_4"],
        AMPERE,
        PACKAGES,
        "9.0 or more",
    ),
    "flash attention 3 on Ampere": (
        ["--attn_implementation", "flash_attention_3"],
        AMPERE,
        PACKAGES,
        "9.0 or more",
    ),
    "an attention that nobody knows": (
        ["--attn_implementation", "varlne"],
        HOPPER,
        PACKAGES,
        "no attention has this name: did you mean varlen? Available: eager, flash",
    ),
    "varlen on a CPU": (["--attn_implementation", "varlen"], None, PACKAGES, "needs an NVIDIA GPU"),
    "varlen on Turing": (
        ["--attn_implementation", "varlen", "--dtype", "float16", "--use_peft"],
        TURING,
        PACKAGES,
        "8.0 or more",
    ),
    "Liger on a CPU": (["--use_liger_kernel"], None, PACKAGES, "Triton kernels need a GPU"),
    "Liger that is not installed": (
        ["--use_liger_kernel"],
        HOPPER,
        set(),
        "pip install liger-kernel",
    ),
    "TF32 on a CPU": (["--tf32"], None, PACKAGES, "compute capability 8.0"),
    "TF32 on Turing": (["--tf32"], TURING, PACKAGES, "compute capability 8.0"),
    "bf16 weights without a master copy": (
        ["--dtype", "bfloat16"],
        AMPERE,
        set(),
        "use --dtype float32",
    ),
    "no master copy of what has one": (
        ["--no_master_weights"],
        AMPERE,
        set(),
        "it changes nothing",
    ),
    "paging without a GPU": (
        ["--optim", "paged_adamw_8bit"],
        None,
        PACKAGES,
        "adamw_8bit or adamw_torch_fused",
    ),
}
ACCEPTED = {
    "nothing": ([], None, set()),
    "flash attention 2": (
        ["--attn_implementation", "flash_attention_2", "--packing"],
        AMPERE,
        {"flash-attn"},
    ),
    "flash attention 3": (["--attn_implementation", "flash_attention_3"], HOPPER, {"flash-attn-3"}),
    "a hub kernel": (
        ["--attn_implementation", "kernels-community/flash-attn2"],
        AMPERE,
        {"kernels"},
    ),
    "Liger, TF32, flex": (
        ["--use_liger_kernel", "--tf32", "--attn_implementation", "flex_attention"],
        ADA,
        PACKAGES,
    ),
    "packing": (["--packing"], None, set()),
    "bf16 weights whose loss of updates is asked for": (
        ["--dtype", "bfloat16", "--no_master_weights"],
        AMPERE,
        set(),
    ),
    "adapters on bf16 weights": (["--dtype", "bfloat16", "--use_peft"], AMPERE, set()),
    "varlen": (
        ["--attn_implementation", "varlen", "--dtype", "bfloat16", "--use_peft", "--packing"],
        AMPERE,
        set(),
    ),
    "padding free, by length": (
        ["--padding_free", "--train_sampling_strategy", "group_by_length"],
        None,
        set(),
    ),
}


def accelerator_on(capability, mixed_precision="fp16", **settings):
    """An Accelerator of one process on such a GPU, on a CPU if there is none."""
    return SimpleNamespace(
        device=SimpleNamespace(type="cuda" if capability else "cpu"),
        mixed_precision=mixed_precision,
        num_processes=1,
        distributed_type="NO",
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None),
        **settings,
    )


@pytest.fixture
def problems_of(monkeypatch):
    """A function from flags, capability, packages, precision and environment to the problems."""
    versions = {"transformers": "5.23.0"}
    version_of = importlib.metadata.version
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: versions.get(name) or version_of(name)
    )

    def find(
        flags, capability=None, packages=(), mixed_precision="fp16", transformers="5.23.0", **env
    ):
        versions["transformers"] = transformers
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(device_checks, "is_installed", lambda name: name in packages)
        accelerator = accelerator_on(capability, mixed_precision)
        return find_problems(language_model_arguments(*flags), accelerator)

    return find


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_is_refused_with_the_reason(name, problems_of):
    flags, capability, packages, says = REFUSED[name]
    found = problems_of(flags, capability, packages)
    assert len(found) == 1 and says in found[0] and found[0].startswith(flags[0]), found


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_can_run_is_not(name, problems_of):
    assert problems_of(*ACCEPTED[name]) == []


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


EMULATED = "no bf16 hardware"
FLASH = ["--attn_implementation", "flash_attention_2"]
HUB_FLASH = ["--attn_implementation", "kernels-community/flash-attn2"]


@pytest.mark.parametrize(
    ("flags", "capability", "mixed_precision", "says"),
    [
        ([], TURING, "bf16", f"(compute capability 7.5) has {EMULATED}"),
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


@pytest.mark.parametrize(
    ("version", "refused"),
    [("5.17.0", True), ("5.18.1", True), ("5.19.0", False), ("5.23.0", False), ("6.0.0", False)],
)
def test_tf32_is_refused_where_transformers_would_round_positions(version, refused, problems_of):
    found = problems_of(["--tf32"], HOPPER, transformers=version)
    assert len(found) == refused and all("transformers 5.19" in problem for problem in found)
    assert problems_of([], HOPPER, transformers=version) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_compiling_on_a_cpu_needs_a_compiler(is_there, problems_of, monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path) if is_there else os.devnull)
    found = problems_of(["--torch_compile"])
    assert len(found) == (not is_there) and all("put a compiler" in problem for problem in found)
