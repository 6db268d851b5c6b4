# SPDX-License-Identifier: Apache-2.0
"""What the runs of a family and transformers itself say of it, as one row of results."""

from pathlib import Path
from typing import Any

from exits import first_line

from . import own_loss
from .launches import KINDS, Kind, RunFailedError, launch
from .models import write_model

Row = dict[str, Any]

# Relative; fp32 rounds to 6e-8, and a loss is a mean of sums of some hundred roundings.
BOUND = 1e-6


def measure(family: str, rows: Path, folder: Path, *, warm: bool) -> Row:
    """Make a model of a family, train it in each way, and return its row.

    Args:
        family: a key of catalog.FAMILIES.
        rows: the file of the rows.
        folder: a new folder for the model and the runs.
        warm: start from processes that have already imported the libraries.
    """
    model_folder = folder / "model"
    row: Row = {"family": family}
    try:
        write_model(family, model_folder)
        model = own_loss.load(model_folder)
        batch = own_loss.read_batch(rows, model_folder)
        row["class"] = type(model).__name__
        row["own_loss"] = own_loss.loss_of(model, batch)
        row["router_loss"] = router_loss_of(model, batch)
    except Exception as error:  # Each model raises exceptions of its own.
        message = f"{type(error).__name__}: {first_line(error)}"
        return row | {"verdict": "FAILED", "problems": [f"transformers: {message}"]}
    problems = []
    for name, kind in KINDS.items():
        run_folder = folder / name
        try:
            finished = launch(kind, model_folder, rows, run_folder, warm=warm)
            row["attention"] = finished.attention
            row[name] = {
                "losses": finished.losses,
                "trained": finished.trained,
                **loaded_again(kind, run_folder, model_folder, batch),
            }
        except RunFailedError as error:
            problems.append(f"{name}: {error}")
        except Exception as error:  # of loading what was saved
            message = f"{type(error).__name__}: {first_line(error)}"
            problems.append(f"{name}: the result does not load: {message}")
        else:
            problems += [f"{name}: {text}" for text in problems_of(row["own_loss"], row[name])]
    return row | {"verdict": "FAILED" if problems else "ok", "problems": problems}


def router_loss_of(model: Any, batch: dict[str, Any]) -> float | None:
    """Return what the model adds to its own loss for its router if it is asked to, or None.

    By default no model adds it: `output_router_logits` is off, and the own loss is the
    cross-entropy alone, as the recipe's is.
    """
    if not hasattr(model.config, "output_router_logits"):
        return None
    asked = own_loss.loss_of(model, batch | {"output_router_logits": True})
    return asked - own_loss.loss_of(model, batch)


def loaded_again(kind: Kind, folder: Path, model_folder: Path, batch: dict[str, Any]) -> Row:
    """Return the own loss of the model that a run wrote, and of its adapters how many there are.

    Adapters are loaded on the model that was there before the run. So their loss is only that of
    the trained model if the run changed nothing else.
    """
    if not kind.uses_adapters:
        return {"loaded": own_loss.loss_of(own_loss.load(folder), batch)}
    model = own_loss.load(folder, base=model_folder)
    return {
        "loaded": own_loss.loss_of(model, batch),
        "adapters": own_loss.count_adapters(model),
        "untrained": own_loss.untrained_adapters(model),
    }


def problems_of(own: float, run: Row) -> list[str]:
    """Return what is wrong with a run: its first loss, its learning, or what it saved.

    Args:
        own: the loss of the model before the run, by transformers.
        run: an entry of a row, as `measure` makes it.
    """
    problems = []
    first = run["losses"][0]
    if relative(first, own) > BOUND:
        problems.append(f"the first loss is {first:.8g}, the model's own is {own:.8g}")
    if not run["trained"] < first:
        problems.append(f"the loss does not fall: {first:.8g}, then {run['trained']:.8g}")
    if relative(run["loaded"], run["trained"]) > BOUND:
        problems.append(
            f"the loss of the trained model is {run['trained']:.8g}, "
            f"of the loaded one {run['loaded']:.8g}"
        )
    if run.get("untrained"):
        problems.append(f"adapters without an effect: {', '.join(run['untrained'])}")
    return problems


def relative(ours: float, theirs: float) -> float:
    """Return the relative difference of two losses."""
    return abs(ours - theirs) / abs(theirs)
