# SPDX-License-Identifier: Apache-2.0
"""Several data sets in one run: their rows as one, in given shares."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from components.best import require_rows_to_choose_by
from components.rows import (
    Prepare,
    Rows,
    hold_out_rows,
    open_splits,
    prepare_rows,
)
from core.exits import Exit, fail


def read_splits(
    args: Any,
    prepare: Prepare,
    *,
    evaluate: bool,
    text_columns: Sequence[str] = (),
    limits: Sequence[str] = ("max_length",),
) -> tuple[Rows, Rows | None]:
    """Return the rows to train on and those to evaluate on, as `prepare` makes them.

    For each data set this is `open_splits`, and `prepare_rows` of each split. The rows of all are
    joined, some of them are held out, and the others are mixed. Without --eval_dataset_name, the
    rows to evaluate on are those of all data sets that have a --dataset_test_split; without any,
    --load_best_model_at_end ends with 64.

    Args:
        evaluate, text_columns: as in `open_splits`.
        prepare, limits: as in `prepare_rows`.
    """
    names = args.dataset_name
    if len(names) > 1 and args.dataset_config is not None:
        fail(Exit.USAGE, "--dataset_config is for one data set, and there are several")
    repeated = [name for name in names if list(names).count(name) > 1]
    if repeated:
        fail(
            Exit.USAGE, f"--dataset_name {repeated[0]}: given twice; --dataset_weights repeats rows"
        )
    train_rows = []
    eval_rows = {}
    for name in names:
        train_split, eval_split = open_splits(
            name, args, evaluate=evaluate, text_columns=text_columns
        )
        train_rows.append(prepare_rows(train_split, prepare, args, limits=limits))
        if eval_split is not None and eval_split.source.name not in eval_rows:
            rows = prepare_rows(eval_split, prepare, args, limits=limits)
            eval_rows[eval_split.source.name] = rows
    joined, held_out = hold_out_rows(join_rows(names, train_rows), args, evaluate=evaluate)
    mixed = mix_rows(joined, args.dataset_weights, args.seed)
    if eval_rows:
        held_out = join_rows(list(eval_rows), list(eval_rows.values()))
    require_rows_to_choose_by(args, held_out, "--eval_split")
    return mixed, held_out


@dataclass(frozen=True)
class Part:
    """The rows of one data set among those of several, which are numbered as one.

    Attributes:
        name: the data set as the user named it.
        prefix: the text before the number of a row in messages: "train.jsonl, line".
        before: the number of the last row before its first.
    """

    name: str
    prefix: str
    before: int


@dataclass(frozen=True, kw_only=True)
class MixedRows(Rows):
    """The rows of several data sets.

    Attributes:
        parts: the data sets, in the order of their rows' numbers.
    """

    parts: tuple[Part, ...]

    def place(self, index: int) -> str:
        """Return where the row at an index, counted from 0, comes from: "train.jsonl, line 7"."""
        number = int(self.dataset[index]["row"])
        part = self.parts[self.parts_of(np.array([number]))[0]]
        return f"{part.prefix} {number - part.before}"

    def parts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the place, from 0, of the part to which each number of a row belongs."""
        begins = [part.before for part in self.parts]
        return np.searchsorted(begins, numbers, side="left") - 1


def join_rows(names: Sequence[str], rows: Sequence[Rows]) -> Rows:
    """Return the rows of several data sets as one; of a single one as they are.

    The rows keep their order. Their numbers count through all data sets.

    Args:
        names: of the data sets.
        rows: of each data set.
    """
    if len(rows) == 1:
        return rows[0]
    from datasets import concatenate_datasets  # imported here: a plan of the memory needs no rows

    datasets = []
    parts = []
    notes = []
    warnings = []
    before = 0
    for name, one in zip(names, rows, strict=True):
        numbers = one.column("row") + before
        dataset: Any = one.dataset  # datasets annotates its methods as if it were a DatasetDict too
        datasets.append(dataset.remove_columns("row").add_column("row", numbers))
        parts.append(Part(name, one.prefix, before))
        begin = f" (numbered from {before + 1})" if before else ""
        notes.append(f"{name}{begin}: {one.notes}")
        if one.warning:
            warnings.append(f"{name}: {one.warning}")
        before = int(numbers.max())
    joined = concatenate_datasets(datasets).with_format("numpy")
    summary = f"{len(joined)} in {len(rows)} data sets; {'; '.join(notes)}"
    return MixedRows(joined, summary, "row", "; ".join(warnings), parts=tuple(parts))


def mix_rows(rows: Rows, weights: Sequence[float], seed: int) -> Rows:
    """Return as many rows as there are, in the shares that --dataset_weights gives the data sets.

    A data set with more rows than its share is cut to a random choice of them, and one with fewer
    is repeated: each of its rows the same number of times, or once more. Which rows these are, and
    the order of all, depends on nothing but the seed and the numbers of rows.

    Args:
        weights: of the data sets of these rows, in their order; none leave the rows as they are.
    """
    if not weights or not isinstance(rows, MixedRows):
        return rows
    part_of_row = rows.parts_of(rows.column("row"))
    shares = divide(len(rows), weights)
    drawn = []
    notes = []
    for number, (part, share) in enumerate(zip(rows.parts, shares, strict=True)):
        own = np.flatnonzero(part_of_row == number)
        if not len(own):
            fail(Exit.DATA, f"{part.name}: --eval_split leaves none of its rows to train on")
        drawn.append(draw(own, share, np.random.default_rng([seed, number])))
        notes.append(describe_share(part.name, share, len(own)))
    order = np.random.default_rng(seed).permutation(np.concatenate(drawn))
    dataset: Any = rows.dataset
    written = " : ".join(f"{weight:g}" for weight in weights)
    mixed = f"{rows.notes}; mixed {written}: {', '.join(notes)}"
    return replace(rows, dataset=dataset.select(order), notes=mixed)


def divide(total: int, weights: Sequence[float]) -> list[int]:
    """Return the shares of a total in proportion to weights, as whole numbers that add up to it.

    What rounding down leaves goes to the largest remainders, the first of equal ones first.
    """
    exact = total * np.array(weights) / sum(weights)
    shares = np.floor(exact).astype(int)
    by_remainder = np.argsort(shares - exact, kind="stable")
    shares[by_remainder[: total - shares.sum()]] += 1
    return shares.tolist()


def draw(places: np.ndarray, number: int, generator: np.random.Generator) -> np.ndarray:
    """Return `number` of these places: each equally often, a random choice of them once more."""
    times, rest = divmod(number, len(places))
    once_more = generator.permutation(places)[:rest]
    return np.concatenate([np.tile(places, times), once_more])


def describe_share(name: str, share: int, size: int) -> str:
    """Return how many rows of a data set are used, and how often each."""
    if share <= size:
        return f"{share} of the {size} rows of {name}"
    times, rest = divmod(share, size)
    often = f"{times} or {times + 1}" if rest else str(times)
    return f"{share} rows of {name}, each {often} times"
