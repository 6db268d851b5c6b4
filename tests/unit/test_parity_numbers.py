"""scripts/parity.py calls nothing equal that is not, and the published tables and numbers are what was measured."""

import json
import math
import re
from statistics import median

import numpy as np
import parity
import pytest
import torch
from bench.figures import milliseconds_more, named, paired, values
from bench.operations import matmul_weights
from launching import REPO
from publish import pages
from safetensors.numpy import save_file

RESULTS = json.loads((REPO / "results" / "parity.json").read_text())


def finished_run(folder, losses=(1.0, 2.0), norms=(1.0, 1.0), weights=(1.0, 2.0), name="weight"):
    """A folder as a run leaves it."""
    folder.mkdir()
    pairs = zip(losses, norms, strict=True)
    lines = [{"loss": loss, "grad_norm": norm, "learning_rate": 1e-3} for loss, norm in pairs]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    save_file({name: np.array(weights, dtype="float32")}, folder / "model.safetensors")
    return folder


def test_equal_runs_differ_by_nothing(tmp_path):
    found = parity.compare(finished_run(tmp_path / "a"), finished_run(tmp_path / "b"))
    assert found == dict.fromkeys(parity.BOUNDS, 0.0) and parity.within(found, parity.BOUNDS)


@pytest.mark.parametrize(
    ("number", "change"),
    [
        ("loss", {"losses": (1.0, 2.0 + 4e-6)}),
        ("loss", {"losses": (1.0, math.nan)}),
        ("grad_norm", {"norms": (1.0, 0.0)}),
        ("grad_norm", {"norms": (1.0, None)}),
        ("weights", {"weights": (1.0, 2.0001)}),
        ("weights", {"weights": (1.0, math.nan)}),
        ("weights", {"weights": (0.0, 0.0)}),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_a_number_that_differs_is_out_of_bounds(number, change, swapped, tmp_path):
    pair = finished_run(tmp_path / "a", **change), finished_run(tmp_path / "b")
    found = parity.compare(*(reversed(pair) if swapped else pair))
    assert not parity.within(found, parity.BOUNDS)
    assert parity.within({**found, number: 0.0}, parity.BOUNDS)  # and nothing else is


def test_runs_with_other_tensors_or_steps_cannot_be_compared(tmp_path):
    sound = finished_run(tmp_path / "a")
    with pytest.raises(ValueError, match="other tensors"):
        parity.compare(finished_run(tmp_path / "b", name="other"), sound)
    with pytest.raises(ValueError, match="zip"):
        parity.compare(finished_run(tmp_path / "c", losses=(1.0,), norms=(1.0,)), sound)


def test_the_reason_for_the_wider_bound_of_gradient_norms_holds():
    random = torch.Generator().manual_seed(0)
    gradient = (
        torch.randn(320, 320, generator=random)
        * torch.randn(320, 320, generator=random).mul(2).exp()
    )
    in_fp32, in_fp64 = (
        torch.linalg.vector_norm(gradient).item(),
        torch.linalg.vector_norm(gradient.double()).item(),
    )
    assert parity.BOUNDS["grad_norm"] < (in_fp64 - in_fp32) / in_fp64 < 2e-5


def test_every_yaml_was_measured_and_none_is_out_of_bounds():
    rows = [row for row in RESULTS["rows"] if row["group"] == "strategies"]
    rows = {(row["config"], row["weights"], row["ranks"]): row for row in rows}
    measured = {
        parity.Run(
            **{name: row[name] for name in parity.Run._fields} | {"flags": tuple(row["flags"])}
        ): row["verdict"]
        for row in RESULTS["rows"]
    }
    for row in (row for row in RESULTS["rows"] if row["verdict"] == "ok"):
        run = parity.Run(**{name: row[name] for name in parity.Run._fields})
        assert row["bytes"] == "ok" and parity.within(row["differences"], parity.bounds_of(run)[0])
    known, readme = {run.recipe for run in measured}, (REPO / "README.md").read_text()
    not_yet = (
        {"bf16"}
        if "not measured yet: `python scripts/parity.py --groups bf16`" in readme
        else set()
    )
    assert measured == {
        run: "refused" if parity.refuses(run) else "ok"
        for run in parity.all_runs()
        if run.recipe in known and run.group not in not_yet
    }
    told = re.search(r"Not measured yet under every YAML: (.*?)\.\s", readme, re.DOTALL)
    assert set(parity.MAKERS) - known == set(re.findall(r"`(\w+)\.py`", told[1] if told else ""))
    for config in parity.configs():
        for ranks in {parity.ranks_of(config, 2), parity.ranks_of(config, 4)}:
            row = rows[config, "full", ranks]
            assert row["bytes"] == "ok" and all(
                len(held["ranks"]) == ranks for held in row["held"].values()
            )


def test_the_tables_are_those_of_the_measurements():
    text, again = (REPO / "README.md").read_text(), "python scripts/readme_tables.py"
    results = pages.read_results()
    assert pages.fill(text, results) == text, again
    assert pages.whole(results) == (REPO / "results" / "README.md").read_text(), again


def test_the_first_screen_tells_the_measured_speed():
    bullet = re.search(
        r"- \*\*Speed at the floor\.\*\*(.*?)\n\n", (REPO / "README.md").read_text(), re.DOTALL
    )[1]
    results = pages.read_results()["benchmark"]
    medium, nothing, shipped = (
        named(results, name)
        for name in ("matched, medium", "matched, near zero", "shipped, medium")
    )
    shape = medium["models"]["medium"]
    weights = matmul_weights(shape) + shape["hidden_size"] * shape["vocab_size"]
    slower = median(paired(nothing, "ours", "floor", of=milliseconds_more))
    faster = [
        median(paired(shipped, "ours", label, "tokens_per_second"))
        for label in ("trainer", "trl packed")
    ]
    told = [f"{weights / 1e6:.0f}M", f"{slower:.1f}", *(f"{ratio:.1f}" for ratio in faster)]
    assert re.findall(r"[0-9.]+M?\b", bullet) == told
    assert median(paired(medium, "ours", "floor")) <= 1  # no slower
    losses = {
        label: median(values(shipped, label, "held_out_loss").values())
        for label in ("ours", "trainer", "trl packed")
    }
    assert losses["ours"] == min(losses.values()), losses  # as low a loss
