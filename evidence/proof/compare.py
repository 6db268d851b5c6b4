# SPDX-License-Identifier: Apache-2.0
"""How much two finished runs of one job differ, and how much they may."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from proof.jobs import Run

Differences = Mapping[str, float | None]  # by the keys of BOUNDS; None: not reported

# Softmax is invariant to a bias of the keys. Its gradient is rounding noise, which AdamW scales up
# to whole steps.
NO_GRADIENT = ("key.bias", "k_proj.bias")
BOUNDS = {"loss": 1e-6, "grad_norm": 1e-6, "learning_rate": 0.0, "weights": 1e-5}
BF16_BOUNDS = {"loss": 5e-3, "grad_norm": 2e-2, "learning_rate": 0.0, "weights": 1e-2}
SHARDED_GRAD_NORM = 1e-5
NAMES = {
    "loss": "loss",
    "grad_norm": "gradient norm",
    "learning_rate": "learning rate",
    "weights": "final weights",
}
WHY_BF16 = (
    "bf16 keeps 8 bits: a single number is off by up to 2^-9, and later steps by more. "
    "One process, DDP and FSDP1 autocast only products, FSDP2 and DeepSpeed compute all of a "
    "layer in bf16"
)
WHY_NO_NORM = "DeepSpeed reports no gradient norm in fp32 when nothing is sharded"
WHY_SHARDED_NORM = (
    "Where weights are split, ranks add up gradients in fp32 in an order of their own; the norm of "
    "the sum is taken in fp64"
)


def read_steps(folder: Path | str) -> list[dict]:
    """Return the lines of metrics.jsonl that are about a training step."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "loss" in line]


def read_weights(folder: Path | str) -> dict[str, np.ndarray]:
    """Return the exported tensors by name, in float64, without those that have no gradient."""
    from safetensors.torch import load_file  # Imports torch, which tables do without.

    weights = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if not name.endswith(NO_GRADIENT):
                # torch converts: DeepSpeed exports in bf16, which numpy does not support.
                weights[name] = tensor.double().numpy()
    return weights


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """||ours - theirs|| / ||theirs|| (Frobenius), and 0 if they are equal.

    It is NaN or infinite where one of the numbers is.
    """
    if np.array_equal(ours, theirs):
        return 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


def compare(folder: Path, reference: Path) -> Differences:
    """Return the largest relative differences between two finished runs over steps and tensors.

    None stands for a number that one of them does not report. NaN is never within a bound.

    Raises:
        ValueError: if they have different steps or different tensors.
    """
    steps = list(zip(read_steps(folder), read_steps(reference), strict=True))
    found = {}
    for key in ("loss", "grad_norm", "learning_rate"):
        found[key] = largest_difference([(ours[key], theirs[key]) for ours, theirs in steps])
    ours = read_weights(folder)
    theirs = read_weights(reference)
    if ours.keys() != theirs.keys() or not ours:
        raise ValueError(f"{folder} and {reference} hold different tensors")
    found["weights"] = float(np.max([relative(ours[name], theirs[name]) for name in ours]))
    return found


def largest_difference(pairs: list[tuple[float | None, float | None]]) -> float | None:
    """Return the largest relative difference of a number over the steps, NaN if there is one.

    It is None if a step of either run does not report the number.
    """
    differences = []
    for ours, theirs in pairs:
        if ours is None or theirs is None:
            return None
        differences.append(relative(np.array(ours), np.array(theirs)))
    return float(np.max(differences))


def bounds_of(run: Run) -> tuple[Differences, str]:
    """Return the bounds of a run's differences, and the reason if they are not `BOUNDS`.

    A bound of None means that the number is not reported.
    """
    if run.precision == "bf16":
        return BF16_BOUNDS, WHY_BF16
    if run.config == "deepspeed_zero0":
        return BOUNDS | {"grad_norm": None}, WHY_NO_NORM
    trains_matrices = run.weights == "full" or "--modules_to_save" in run.flags
    if trains_matrices and run.config not in ("single", "ddp", "fsdp1_no_shard"):
        return BOUNDS | {"grad_norm": SHARDED_GRAD_NORM}, WHY_SHARDED_NORM
    return BOUNDS, ""


def within(found: Differences, bounds: Differences) -> bool:
    """Return whether each difference is at most its bound, and missing where it has to be."""
    return all(is_within(found[key], bound) for key, bound in bounds.items())


def is_within(difference: float | None, bound: float | None) -> bool:
    """Return whether one difference is within its bound, which NaN never is."""
    if difference is None or bound is None:
        return difference is None and bound is None
    return difference <= bound
