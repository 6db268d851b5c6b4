# SPDX-License-Identifier: Apache-2.0
"""What the runs of a family and transformers itself say of it, as one row of results."""

from pathlib import Path
from typing import Any

from exits import first_line

from . import own_loss
from .launches import KINDS, Kind, RunFailedError, launch
from .models import write_model
from .tables import BOUND, OK, Row, relative

FAILED = "FAILED"


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
        return row | {"verdict": FAILED, "problems": [f"in transformers: {describe(error)}"]}
    problems = []
    for name, kind in KINDS.items():
        try:
            run = train(kind, model_folder, rows, folder / name, batch, warm=warm)
        except RunFailedError as error:
            problems.append(f"{name}: {error}")
            continue
        row["attention"] = run.pop("attention")
        row[name] = run
        problems += [f"{name}: {text}" for text in problems_of(row["own_loss"], run)]
    verdict = FAILED if problems else OK
    return row | {"verdict": verdict, "problems": problems}


def describe(error: Exception) -> str:
    """Return an exception in one line."""
    return f"{type(error).__name__}: {first_line(error)}"


def router_loss_of(model: Any, batch: dict[str, Any]) -> float | None:
    """Return what the model adds to its own loss for its router if it is asked to, or None.

    Without being asked no model adds it: `output_router_logits` is off in each configuration, so
    that the own loss is the cross-entropy only, as the recipe's is.
    """
    if not hasattr(model.config, "output_router_logits"):
        return None
    added = own_loss.loss_of(model, batch | {"output_router_logits": True})
    return added - own_loss.loss_of(model, batch)


def train(
    kind: Kind, model_folder: Path, rows: Path, folder: Path, batch: dict[str, Any], *, warm: bool
) -> Row:
    """Train a model in one way, load what the run wrote, and return what both say.

    Adapters are loaded on the model that was there before the run. So their loss is only that of
    the trained model if the run changed nothing else.

    Raises RunFailedError if the recipe fails, or its result does not load.
    """
    finished = launch(kind, model_folder, rows, folder, warm=warm)
    base = model_folder if kind.uses_adapters else None
    try:
        model = own_loss.load(folder, base)
        loaded = own_loss.loss_of(model, batch)
    except Exception as error:
        raise RunFailedError(f"the result does not load: {describe(error)}") from error
    run: Row = {
        "attention": finished.attention,
        "losses": finished.losses,
        "trained": finished.trained,
        "loaded": loaded,
    }
    if kind.uses_adapters:
        adapters = own_loss.effect_of_adapters(model)
        run["adapters"] = len(adapters)
        run["untrained"] = [name for name, has_effect in adapters.items() if not has_effect]
    return run


def problems_of(own: float, run: Row) -> list[str]:
    """Return what is wrong with a run: its first loss, its learning, or what it saved.

    Args:
        own: the loss of the model before the run, by transformers.
        run: as `train` returns it.
    """
    problems = []
    first = run["losses"][0]
    trained = run["trained"]
    if not relative(first, own) <= BOUND:
        problems.append(f"the first loss is {first:.8g}, the model's own is {own:.8g}")
    if not trained < first:
        problems.append(f"the loss does not fall: {first:.8g}, then {trained:.8g}")
    if not relative(run["loaded"], trained) <= BOUND:
        problems.append(
            f"the loss of the trained model is {trained:.8g}, "
            f"that of the loaded one {run['loaded']:.8g}"
        )
    if run.get("untrained"):
        problems.append(f"adapters that were not trained: {', '.join(run['untrained'])}")
    return problems
