# SPDX-License-Identifier: Apache-2.0
"""What differs between a checkpoint's run and this call, and whether it may differ."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from core.arguments import CommonArguments
from core.cli import may_change


@dataclass(frozen=True)
class Changes:
    """What differs from the checkpoint's run.

    Attributes:
        lines: one for each value that differs: its name, and the values before and now.
        refusal: why this call cannot continue the run and what to use instead; "" if it can.
    """

    lines: list[str]
    refusal: str


def find_changes(
    args: CommonArguments,
    before: Mapping[str, Any],
    identity: Mapping[str, Any],
    num_processes: int,
) -> Changes:
    """Compare a call with the checkpoint's run.

    The number of rows per optimizer step must be the same. An argument that is not marked
    MAY_CHANGE may only differ if --allow_change names it.

    Args:
        before: arguments and identity of the checkpoint's run.
        identity: rows_per_step, the rows per optimizer step over all ranks; data, a hash of the
            training rows; and with adapters base_weights, a hash of what they are added to.
    """
    now = vars(args) | dict(identity)
    changed = [name for name, value in now.items() if value != before.get(name, value)]
    told = [name for name in changed if name != "allow_change"]  # It is only about this call.
    lines = [f"{name} {before[name]} -> {now[name]}" for name in told]
    return Changes(lines, find_refusal(args, changed, before, identity, num_processes))


def find_refusal(
    args: CommonArguments,
    changed: list[str],
    before: Mapping[str, Any],
    identity: Mapping[str, Any],
    num_processes: int,
) -> str:
    """Return why a call cannot continue the run, or "" if it can."""
    rows = before["rows_per_step"]
    if rows != identity["rows_per_step"]:
        fix = flags_for_rows_per_step(rows, args.per_device_train_batch_size, num_processes)
        return (
            f"a step of the checkpoint's run has {rows} rows, but here it would have "
            f"{identity['rows_per_step']}: use {fix}"
        )
    allowed = may_change(type(args)).union(args.allow_change)
    unsafe = [name for name in changed if name not in allowed]
    if unsafe:
        return (
            f"the checkpoint's run had other values of {', '.join(unsafe)}, listed above: use "
            f"those, or --allow_change {' '.join(unsafe)}, or another --output_dir"
        )
    return ""


def flags_for_rows_per_step(rows: int, largest: int, num_processes: int) -> str:
    """Return the flags that give a step this number of rows, as text.

    Args:
        largest: the rows of a micro-batch that are known to fit into memory.
    """
    for size in range(min(largest, rows), 0, -1):
        if rows % (size * num_processes) == 0:
            accumulation = rows // (size * num_processes)
            return (
                f"--per_device_train_batch_size {size} --gradient_accumulation_steps {accumulation}"
            )
    return f"a number of ranks that divides {rows}"
