"""Cells that prove the recipes right on a GPU.

They are about every strategy, masks, parity with fp32, resume, quantized bases, optimizers, and the
other recipes. Each launches the shipped recipe under shipped YAML files.
"""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from xml.etree import ElementTree

from accelerate.utils import compare_versions

from . import launches
from .cell import ROOT, Outcome, Skip, relative_error
from .launches import (
    Variant,
    adapters,
    failed,
    falls,
    held,
    job,
    largest_difference,
    row_of,
    tiny_model,
    train_all,
)

LOSS_BOUND = 2e-2  # relative, over 20 steps: bf16 keeps eight bits, TF32 and fp16 eleven
# Relative: kernels add in no fixed order, and AdamW carries that on for ten steps
RESUME_BOUND = 2e-3
# Relative, of the first loss: 4 and 8 bits round a random model's logits by some percent
QUANTIZED_BOUND = 0.1
PEAK_BOUND = 1.1  # peak of a resumed run to that of the run before
ONE_RANK = "refused: one rank of FSDP1 is NO_SHARD, which loses frozen weights beside adapters"
FIRST_STATE = 10  # step of the checkpoint that is resumed from


# ---- Every strategy ----


def strategies(*configs):
    """Return a cell that trains full weights and QLoRA under each YAML.

    It reads the shard report of each launch.
    """

    def run(setup):
        variants = []
        for config in configs:
            variants += variants_under(setup, config)
        outcome = Outcome(ok=True)
        for trained in train_all(setup, variants, tiny_model(setup)):
            row = row_of(trained)
            if trained.report:
                row["shard report"] = trained.report["verdict"]
                for kind in ("parameters", "gradients", "optimizer"):
                    row[f"{kind}, bytes"] = held(trained, kind)
                row["learns"] = falls(trained.losses)
                outcome.ok = outcome.ok and row["learns"] and row["shard report"] == "ok"
            add_row(outcome, row, trained)
        return outcome

    return run


def variants_under(setup, config):
    """Return full weights and QLoRA under one YAML, with the reason where one cannot train."""
    if "hybrid" in config:
        return [Variant(config, config, left_out="its mesh needs four GPUs")]
    left_out = ""
    one_rank = config.startswith("fsdp1") and setup.device == "cuda"
    if one_rank or config == "fsdp1_no_shard":
        left_out = ONE_RANK
    if config == "fsdp1_shard_grad_op":
        left_out = "the recipe refuses a 4-bit base there"
    qlora = job(setup, *adapters(setup, "nf4"))
    return [
        Variant(f"{config}, full", config, flags=job(setup)),
        Variant(f"{config}, QLoRA", config, flags=qlora, left_out=left_out),
    ]


def add_row(outcome, row, trained):
    """Add the row of a launch to an outcome, which does not hold if the launch failed."""
    outcome.ok = outcome.ok and not failed(trained)
    outcome.rows.append(row)
    outcome.commands.append(trained.command)


# ---- Masks ----


def masks(setup):
    """Logits of packed documents do not depend on their neighbors, under any attention.

    The test of that runs as it is.
    """
    return run_tests(setup, "tests/gpu/test_masks_on_gpu.py")


def run_tests(setup, path):
    """Run a file of tests; one row a test, ok if some passed and none failed."""
    report = setup.work / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--junitxml"]
    command += [str(report), str(path)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=max(setup.seconds_left(), 1),
    )
    if not report.exists():
        raise RuntimeError(f"pytest wrote no report: {launches.error_of(done.stdout)}")
    cases = ElementTree.parse(report).iter("testcase")
    rows = [{"test": case.get("name"), "result": result_of(case)} for case in cases]
    passed = any(row["result"] == "passed" for row in rows)
    broken = any(row["result"].startswith(("failure", "error")) for row in rows)
    return Outcome(rows, passed and not broken, [launches.printable(command, setup)])


def result_of(case):
    """Return how a test of a JUnit report ended, with the first line of the reason."""
    result = "passed"
    for kind in ("skipped", "failure", "error"):
        found = case.find(kind)
        if found is not None:
            message = found.get("message") or ""
            result = f"{kind}: {message.splitlines()[0][:200]}"
    return result


def packed_rows(setup):
    """With packed and padding-free rows each attention gives the loss of eager attention."""
    outcome = Outcome(ok=True)
    packing = ("--packing", "--max_length", "128")
    for name, flags in (("packed", packing), ("padding-free", ("--padding_free",))):
        variants = [
            attention_variant(setup, name, "eager", flags),
            attention_variant(setup, name, "sdpa", flags),
            attention_variant(setup, name, "flex_attention", flags),
            attention_variant(setup, name, "varlen", flags),
            attention_variant(setup, name, "flash_attention_2", flags, ("flash-attn",)),
        ]
        trained = train_all(setup, variants, tiny_model(setup))
        compare(outcome, trained, trained[0])
        setup.keep(outcome)
    return outcome


def attention_variant(setup, name, kernel, flags, needs=()):
    """Return a variant with one attention; what only a GPU has is left out on a CPU."""
    runs_here = setup.device == "cuda" or kernel in ("eager", "sdpa")
    left_out = "" if runs_here else "needs a GPU"
    flags = job(setup, "--attn_implementation", kernel, *flags)
    return Variant(f"{name}, {kernel}", flags=flags, left_out=left_out, needs=needs)


def compare(outcome, trained, reference, bound=LOSS_BOUND):
    """Add a row for each launch, with its largest difference from the reference's losses.

    The outcome holds if every difference is within the bound, and no launch failed.
    """
    for one in trained:
        row = row_of(one)
        if one.code == 0:
            difference = largest_difference(one.steps, reference.steps)
            row["from the first, relative"] = difference
            outcome.ok = outcome.ok and difference <= bound
        add_row(outcome, row, one)


# ---- Parity with fp32 ----


def parity_table(setup):
    """Precisions, engines, pieces of the loss and checkpointing against fp32 in one process."""
    on_gpu = "" if setup.device == "cuda" else "needs a GPU"
    no_tf32 = on_gpu
    rounds_positions = compare_versions("transformers", "<", "5.19")
    if rounds_positions and not no_tf32:  # the recipes then refuse --tf32
        no_tf32 = "refused below transformers 5.19"
    pieces = ("--max_logits_mib", "0.05")
    variants = [
        Variant("fp32", precision="no", flags=job(setup)),
        Variant("fp32, loss in pieces", precision="no", flags=job(setup, *pieces)),
        Variant("TF32", precision="no", flags=job(setup, "--tf32"), left_out=no_tf32),
        Variant("bf16", flags=job(setup)),
        Variant("bf16, loss in pieces", flags=job(setup, *pieces)),
        Variant("bf16, checkpointed", flags=job(setup, "--gradient_checkpointing")),
        Variant("bf16, a line every 5 steps", flags=job(setup, "--logging_steps", "5")),
        attention_variant(setup, "bf16", "flash_attention_2", (), ("flash-attn",)),
        Variant("fp16", precision="fp16", flags=job(setup), left_out=on_gpu),
        Variant("FSDP2 bf16", "fsdp2_full_shard", flags=job(setup)),
        Variant("FSDP2 fp16", "fsdp2_full_shard", "fp16", job(setup), left_out=on_gpu),
        Variant("FSDP2 offload bf16", "fsdp2_cpu_offload", flags=job(setup)),
        Variant("FSDP1 bf16", "fsdp1_full_shard", flags=job(setup)),
        Variant("ZeRO-2 bf16", "deepspeed_zero2", flags=job(setup)),
        Variant("ZeRO-3 bf16", "deepspeed_zero3", flags=job(setup)),
    ]
    outcome = Outcome(ok=True)
    trained = train_all(setup, variants, tiny_model(setup))
    compare(outcome, trained, trained[0])
    return outcome


def parity_of_packed(setup):
    """Packed rows, which make other batches, against fp32 with packed rows; compiled too."""
    packing = ("--packing", "--max_length", "128")
    on_gpu = "" if setup.device == "cuda" else "compiling takes minutes on a CPU"
    compiled = job(setup, "--torch_compile", *packing)
    liger = job(setup, "--use_liger_kernel", *packing)
    variants = [
        Variant("fp32 packed", precision="no", flags=job(setup, *packing)),
        Variant("bf16 packed", flags=job(setup, *packing)),
        Variant("bf16 packed, compiled", flags=compiled, left_out=on_gpu),
        Variant("bf16 packed, Liger", flags=liger, left_out=on_gpu, needs=("liger-kernel",)),
    ]
    outcome = Outcome(ok=True)
    trained = train_all(setup, variants, tiny_model(setup))
    compare(outcome, trained, trained[0])
    return outcome


# ---- Resume ----


def resume_cell(variants_of, wide=False):
    """Return a cell that runs each variant, takes its newest checkpoint away, and runs it again.

    The losses of both runs are compared.

    variants_of: name of a function of this module that makes them from a Setup, without the flags
    of the job. wide: with a model whose state stands out of the memory of a process.
    """

    def run(setup):
        make_variants = globals()[variants_of]
        steps = 4 if setup.tiny else 2 * FIRST_STATE
        half = steps // 2
        saving = ("--save_steps", str(half), "--save_total_limit", "9")
        data = launches.wide_model(setup) if wide else tiny_model(setup)
        variants = []
        for variant in make_variants(setup):
            flags = job(setup, *variant.flags, *saving, steps=steps)
            variants.append(replace(variant, flags=flags))
        whole = train_all(setup, variants, data)
        peaks = {}
        for trained in whole:
            if trained.code == 0:
                peaks[trained.variant.name] = trained.peak_gib
                forget_second_half(trained.folder / "run", half, steps)
        again = train_all(setup, variants, data)
        compares_peaks = wide and setup.device == "cuda"  # a CPU's is that of the whole process
        outcome = Outcome(ok=True)
        for first, second in zip(whole, again, strict=True):
            row = row_of(second)
            if first.code == 0 and second.code == 0:
                # A run that began at the checkpoint left the lines before it alone, speed included
                row["resumed"] = second.steps[:half] == first.steps[:half]
                row["largest difference"] = largest_difference(second.steps, first.steps)
                peak = peaks[first.variant.name]
                row["peak GiB before"] = round(peak, 3)
                same = row["resumed"] and row["largest difference"] <= RESUME_BOUND
                outcome.ok = outcome.ok and same
                if compares_peaks:
                    row["peak to peak"] = round(second.peak_gib / peak, 3)
                    outcome.ok = outcome.ok and row["peak to peak"] <= PEAK_BOUND
            outcome.ok = outcome.ok and not failed(first)
            add_row(outcome, row, second)
        return outcome

    return run


def forget_second_half(folder, half, steps):
    """Leave a finished run as a kill just after its first checkpoint would have left it."""
    shutil.rmtree(folder / f"checkpoint-{steps}")
    metrics = folder / "metrics.jsonl"
    kept = []
    for line in metrics.read_text().splitlines():
        if json.loads(line)["step"] <= half:
            kept.append(line + "\n")
    metrics.write_text("".join(kept))
    (folder / "status.json").unlink(missing_ok=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()


def resume_of_engines(setup):
    return [
        Variant("one process, bf16"),
        Variant("FSDP2", "fsdp2_full_shard"),
        Variant("FSDP2 offload", "fsdp2_cpu_offload"),
        Variant("FSDP1", "fsdp1_full_shard"),
        Variant("ZeRO-0", "deepspeed_zero0"),
        Variant("ZeRO-2", "deepspeed_zero2"),
        Variant("ZeRO-3", "deepspeed_zero3"),
    ]


def resume_of_offload(setup):
    left_out = "" if setup.device == "cuda" else "its optimizer is torch's on a CPU"
    return [
        Variant("ZeRO-2 offload", "deepspeed_zero2_offload", left_out=left_out),
        Variant("ZeRO-3 offload", "deepspeed_zero3_offload", left_out=left_out),
    ]


def resume_of_precisions(setup):
    on_gpu = "" if setup.device == "cuda" else "needs a GPU"
    return [
        Variant("nf4 LoRA", flags=adapters(setup, "nf4")),
        Variant("int8 LoRA", flags=adapters(setup, "int8")),
        Variant("fp16", precision="fp16", left_out=on_gpu),
        Variant("FSDP2 fp16", "fsdp2_full_shard", precision="fp16", left_out=on_gpu),
        Variant("nf4 LoRA, FSDP2", "fsdp2_full_shard", flags=adapters(setup, "nf4")),
        Variant("nf4 LoRA, ZeRO-3", "deepspeed_zero3", flags=adapters(setup, "nf4")),
    ]


def resume_of_optimizers(setup):
    on_gpu = "" if setup.device == "cuda" else "pages between GPU and host"
    return [
        Variant("adamw_8bit", flags=("--optim", "adamw_8bit")),
        Variant("adamw_torch_fused"),
        Variant("paged_adamw_8bit", flags=("--optim", "paged_adamw_8bit"), left_out=on_gpu),
        Variant("paged_adamw_32bit", flags=("--optim", "paged_adamw_32bit"), left_out=on_gpu),
    ]


# ---- Quantized bases and optimizers ----

OPTIMIZERS = (
    "adamw_torch_fused",
    "adamw_8bit",
    "adamw_torch",
    "paged_adamw_8bit",
    "paged_adamw_32bit",
)


def quantized(setup):
    """int8 and 4-bit bases train from about the loss of the bf16 base, and hold fewer bytes."""
    nf4 = job(setup, *adapters(setup, "nf4"))
    variants = [
        Variant("LoRA", flags=job(setup, *adapters(setup))),
        Variant("nf4", flags=nf4),
        Variant("int8", flags=job(setup, *adapters(setup, "int8"))),
        Variant("nf4, FSDP2", "fsdp2_full_shard", flags=nf4),
        Variant("nf4, FSDP2 offload", "fsdp2_cpu_offload", flags=nf4),
        Variant("nf4, ZeRO-3", "deepspeed_zero3", flags=nf4),
    ]
    trained = train_all(setup, variants, launches.wide_model(setup))
    base = trained[0]
    outcome = Outcome(ok=True)
    for one in trained:
        row = row_of(one)
        if one.code == 0 and base.code == 0:
            row["parameters, bytes"] = held(one, "parameters")
            row["first loss, from LoRA's"] = relative_error(one.losses[0], base.losses[0])
            row["learns"] = falls(one.losses)
            smaller = one is base or row["parameters, bytes"] < held(base, "parameters")
            near = row["first loss, from LoRA's"] <= QUANTIZED_BOUND
            outcome.ok = outcome.ok and smaller and row["learns"] and near
        add_row(outcome, row, one)
    return outcome


def optimizers(setup):
    """Every --optim reaches about the loss of fused AdamW.

    Those of eight bits hold a quarter of its state.
    """
    on_gpu = "" if setup.device == "cuda" else "pages between GPU and host"
    variants = []
    for name in OPTIMIZERS:
        left_out = on_gpu if name.startswith("paged") else ""
        variants.append(Variant(name, flags=job(setup, "--optim", name), left_out=left_out))
    trained = train_all(setup, variants, launches.wide_model(setup))
    fused = trained[0]
    outcome = Outcome(ok=True)
    for one in trained:
        row = row_of(one)
        if one.code == 0 and fused.code == 0:
            row["optimizer, bytes"] = held(one, "optimizer")
            row["last loss, from fused"] = relative_error(one.losses[-1], fused.losses[-1])
            right = row["last loss, from fused"] <= QUANTIZED_BOUND
            if "8bit" in one.variant.name and not setup.tiny:  # small tensors keep 32 bits
                right = right and row["optimizer, bytes"] < 0.3 * held(fused, "optimizer")
            outcome.ok = outcome.ok and right
        add_row(outcome, row, one)
    return outcome


# ---- The other recipes ----

# What the quick example has to show of held-out rows after training
LEAST_SHOWN = {
    "llama": 0.9,
    "llama_dpo": 0.6,
    "mixtral": 0.7,
    "bert": 0.85,
    "vit": 0.85,
    "t5": 80.0,
}
MOST_PERPLEXITY = 4.0


def quickstart(recipe):
    """Return a cell that runs a recipe's quick example in bf16 and reads its held-out result."""

    def run(setup):
        from time_quickstarts import SHOWN, before_and_after

        if shutil.which("make") is None:
            raise Skip("make is not on the PATH")
        out = setup.work / "quickstart"
        precision = "bf16" if setup.device == "cuda" else "no"
        command = ["make", f"quickstart-{recipe}", f"OUT={out}"]
        command += [f"PRECISION={precision}", f"VENV={sys.prefix}"]
        done = subprocess.run(
            command,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=setup.seconds_left(),
            env=dict(os.environ),
        )
        (setup.work / "output.txt").write_text(done.stdout)
        if done.returncode:
            raise RuntimeError(f"exit code {done.returncode}: {launches.error_of(done.stdout)}")
        before, after = before_and_after(recipe, out)
        if recipe == "mistral_pretrain":
            right = after <= MOST_PERPLEXITY
        else:
            right = after >= LEAST_SHOWN[recipe]
        row = {
            "recipe": recipe,
            "shown": SHOWN[recipe],
            "before": before,
            "after": after,
            "precision": precision,
        }
        return Outcome([row], right, [f"make quickstart-{recipe} PRECISION={precision}"])

    return run


# ---- A compiler ----


def needs_compiler():
    """Raise Skip where DeepSpeed could not compile its CPU optimizer."""
    if shutil.which("ninja") and shutil.which("c++"):
        return
    raise Skip("DeepSpeed compiles its CPU optimizer: ninja and a C++ compiler must be on the PATH")


def strategies_with_compiler(*configs):
    """Return the cell of `strategies`, skipped without a compiler."""

    def run(setup):
        needs_compiler()
        return strategies(*configs)(setup)

    return run


def resume_with_compiler(variants):
    """Return the cell of `resume_cell`, skipped without a compiler."""

    def run(setup):
        needs_compiler()
        return resume_cell(variants)(setup)

    return run
