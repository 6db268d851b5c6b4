# SPDX-License-Identifier: Apache-2.0
"""The recipe next to bare loops, Trainer and SFTTrainer on the same batches, at real sizes.

Published figures for one Hopper GPU are bounds; the cells use the settings of each source.
"""

from collections.abc import Callable, Sequence

from bench import machine, prepare
from bench.cells import Contestant, Flags
from bench.figures import NAMES
from bench.gates import CURVE
from bench.gpu_cells import FULL_8B, LORA_8B, QLORA_8B

from .cell import Outcome, Row, Setup, Skip
from .contests import Contest, device_name, settings_of, times_the_step
from .plans import planned_tensors

CONTESTANTS = {
    "ours": Contestant("ours"),
    "lean": Contestant("lean"),
    "trl": Contestant("trl", needs="trl"),
    "trainer": Contestant("trainer"),
    "floor": Contestant("floor"),
}
# By default the pieces of the loss grow with the memory of the card: 2.2 GiB on an H200.
SMALL_PIECES = {"ours": Contestant("ours", {"max_logits_mib": 256})}
LEAN = NAMES["lean"]
BARE_LOOPS = (LEAN, NAMES["floor"])
LOSS_GATE = CURVE["bfloat16"]  # nats, for each step
MOST_OVER_LEAN = 1.05  # a step of the recipe to one of the bare loop that computes the same

# NeMo AutoModel, Llama 3 8B LoRA, one H100, TransformerEngine and Triton:
NEMO_TOKENS = 12_473  # per second
NEMO_SHARE = 0.7  # the share of that speed that the recipe must reach
LEAST_MFU = 0.45  # KempnerForge reports 0.578 for 8B full on one H200
MOST_PEAK_GIB = 8.0  # torchtune reports 7.4 for Llama 3.1 8B QLoRA, 2 x 2,048 tokens, one RTX 4090

# Whether the recipe's row is within a published figure's bound, None if it has none here
Judge = Callable[[Row], bool | None]


def eight_b_lora(setup: Setup) -> Outcome:
    """Train 8B LoRA at 4,096 tokens, and compare it with NeMo's speed."""
    return side_by_side(setup, "proof 8B LoRA", "8B", LORA_8B, fast_enough_lora)


def eight_b_full(setup: Setup) -> Outcome:
    """Train all weights of 8B in bf16 at 4,096 tokens, with a bound on the share of the peak."""
    return side_by_side(setup, "proof 8B full", "8B", FULL_8B, fast_enough_full)


def eight_b_qlora(setup: Setup) -> Outcome:
    """Train 8B QLoRA with two rows of 2,048 tokens, and compare it with torchtune's memory."""
    contestants = CONTESTANTS | SMALL_PIECES
    return side_by_side(setup, "proof 8B QLoRA", "8B", QLORA_8B, small_enough_qlora, contestants)


def one_b_full(setup: Setup) -> Outcome:
    """Train all weights of 1B, for which no figure is published."""
    flags = {"per_device_train_batch_size": 4}
    return side_by_side(setup, "proof 1B full", "1B", flags, no_published_figure)


def make_eight_b(setup: Setup) -> Outcome:
    """Make the 8B model of the following cells on the GPU, and write it once."""
    settings = settings_of(setup)
    prepare.make_models(["8B"], settings)
    folder = settings.model_folder("8B") / "model"
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Outcome([{"bytes of weights": size}], size > 0)


def side_by_side(
    setup: Setup,
    name: str,
    model: str,
    flags: Flags,
    judge: Judge,
    contestants: dict[str, Contestant] = CONTESTANTS,
) -> Outcome:
    """Train the same batches with the recipe and with the other tools."""
    if machine.version_of("datasets") is None:
        raise Skip("not installed: datasets")
    contest = Contest(name, model, flags, contestants)
    device = device_name(setup)
    outcome = Outcome()
    ours = {}
    for label, found in contest.run(setup):
        row = contest.row_of(label, found, device)
        if label == "ours":
            ours = found
            if "failed" not in found:
                row["planned, GiB"] = round(planned_tensors(setup, *contest.job(setup)) / 2**30, 2)
        if "losses" in found and "losses" in ours:
            row["loss differs by"] = largest_difference(found["losses"], ours["losses"])
        times = times_the_step(found, ours)
        if times is not None:
            row["times the recipe's step"] = times
        outcome.rows.append(row)
        outcome.commands.append(found.get("command", ""))
        outcome.ok = verdict(outcome.rows, judge, setup)
        setup.keep(outcome)
    return outcome


def largest_difference(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest difference of two runs' losses, in nats, over the steps of both."""
    pairs = zip(losses, reference, strict=False)
    return max(abs(loss - wanted) for loss, wanted in pairs)


def verdict(rows: Sequence[Row], judge: Judge, setup: Setup) -> bool | None:
    """Return whether the recipe trained and is correct, fast and small enough, None if unknown.

    It must agree with the bare loops, be about as fast as the one that computes the same, and be
    within the cell's own bound. It is unknown without that loop, for which the time may have run
    out. rows: that of the recipe first.
    """
    ours = rows[0]
    if ours["result"] != "trained":
        return False
    loops = [row for row in rows if row["what"] in BARE_LOOPS and row["result"] == "trained"]
    if any(row["loss differs by"] > LOSS_GATE for row in loops):
        return False
    if setup.tiny:
        return None  # Speeds of tiny shapes are meaningless.
    lean = [row for row in loops if row["what"] == LEAN]
    if any(row["times the recipe's step"] < 1 / MOST_OVER_LEAN for row in lean):
        return False
    is_within = judge(ours)
    if is_within and not lean:
        return None
    return is_within


def fast_enough_lora(ours: Row) -> bool:
    """Return whether LoRA reaches its share of NeMo's speed."""
    return ours["tokens/s"] >= NEMO_SHARE * NEMO_TOKENS


def fast_enough_full(ours: Row) -> bool | None:
    """Return whether full fine-tuning reaches its share of the peak, None if that is unknown."""
    if "MFU" not in ours:
        return None
    return ours["MFU"] >= LEAST_MFU


def small_enough_qlora(ours: Row) -> bool | None:
    """Return whether QLoRA's tensors are within the bound, None without a GPU's memory."""
    if "allocated, GiB" not in ours:
        return None
    return ours["allocated, GiB"] <= MOST_PEAK_GIB


def no_published_figure(ours: Row) -> bool:
    """Return True, since there is no further bound."""
    return True
