# SPDX-License-Identifier: Apache-2.0
"""The effect of single options on one job."""

from dataclasses import dataclass, field

from bench.cells import Contestant, Flags
from bench.gpu_cells import LORA

from .cell import Outcome, Setup
from .contests import Contest, device_name, times_the_step

AS_IT_IS = "as it is"
LINES_OF_16K = {"per_device_train_batch_size": 1, "max_length": 16384, "packing": True}


@dataclass(frozen=True)
class Lever:
    """One option, or a few that belong together."""

    name: str
    flags: Flags = field(default_factory=dict)
    needs: str = ""  # package without which it is left out


LORA_LEVERS = (
    Lever("loss in pieces of 4 GiB", {"max_logits_mib": 4096}),
    Lever("loss in pieces of 256 MiB", {"max_logits_mib": 256}),
    Lever("compiled", {"torch_compile": True}),
    Lever("Liger", {"use_liger_kernel": True}, "liger-kernel"),
    Lever("a log line every 4 steps", {"logging_steps": 4}),
)
FLEX = {"attn_implementation": "flex_attention"}
VARLEN = {"attn_implementation": "varlen"}
FLASH = {"attn_implementation": "flash_attention_2"}
PACKING = {"packing": True}
RAGGED_LEVERS = (
    Lever("padding-free", {"padding_free": True}),
    Lever("packed, SDPA", PACKING),
    Lever("packed, flex", PACKING | FLEX),
    Lever("packed, varlen", PACKING | VARLEN),
    Lever("packed, flash", PACKING | FLASH, "flash-attn"),
    Lever("packed, compiled", PACKING | {"torch_compile": True}),
)
LONG_LEVERS = (
    Lever("flex", FLEX),
    Lever("varlen", VARLEN),
    Lever("flash", FLASH, "flash-attn"),
)


def lora(setup: Setup) -> Outcome:
    """Measure each lever of 8B LoRA."""
    flags = LORA | {"per_device_train_batch_size": 2}
    return pull_each(setup, Contest("proof ladder", "8B", flags, contestants_of(LORA_LEVERS)))


def ragged_rows(setup: Setup) -> Outcome:
    """Measure the levers that avoid padding, on rows of varying length."""
    flags = {"per_device_train_batch_size": 4, "max_length": 2048}
    contestants = contestants_of(RAGGED_LEVERS)
    return pull_each(setup, Contest("proof ragged rows", "1B", flags, contestants, "gsm8k"))


def packed_16k(setup: Setup) -> Outcome:
    """Measure each attention kernel on packed sequences of 16,384 tokens."""
    contestants = contestants_of(LONG_LEVERS)
    return pull_each(setup, Contest("proof packed 16k", "1B", LINES_OF_16K, contestants, "gsm8k"))


def contestants_of(levers: tuple[Lever, ...]) -> dict[str, Contestant]:
    """Return the job as it is, and with each single lever."""
    contestants = {AS_IT_IS: Contestant("ours")}
    for lever in levers:
        contestants[lever.name] = Contestant("ours", lever.flags, needs=lever.needs)
    return contestants


def pull_each(setup: Setup, contest: Contest) -> Outcome:
    """Run a job as it is and with each lever; the outcome holds if none of them fails."""
    outcome = Outcome(ok=True)
    as_it_is = {}
    device = device_name(setup)
    for label, found in contest.run(setup):
        row = contest.row_of(label, found, device)
        if label == AS_IT_IS:
            as_it_is = found
        times = times_the_step(found, as_it_is)
        if times is not None:
            row["step, x as it is"] = times
        why = found.get("failed", "")
        outcome.require(not why or why.startswith(("left out", "no time")))
        outcome.rows.append(row)
        outcome.commands.append(found.get("command", ""))
        setup.keep(outcome)
    return outcome
