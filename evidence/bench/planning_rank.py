# SPDX-License-Identifier: Apache-2.0
"""A rank of evidence/benchmark_planning.py: plan a run from prepared rows, phase by phase.

    torchrun --nproc_per_node 8 evidence/bench/planning_rank.py rows.arrow folder 1

The last argument is 1 to pack rows. Each rank writes folder/RANK.json.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from accelerate import Accelerator  # noqa: E402

import paths  # noqa: E402, F401  makes recipes/ importable
from components.batches import BatchPlan  # noqa: E402
from components.data_files import Source  # noqa: E402
from components.lines import pack_rows  # noqa: E402
from components.packing import TokenCollator  # noqa: E402
from components.rows import Rows, Split, keep_usable  # noqa: E402
from measured.host_probe import Phase  # noqa: E402

CAPACITY = 4096  # --max_length
ARGUMENTS = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_steps": -1,
    "num_train_epochs": 3,
    "eval_strategy": "no",
    "seed": 42,
}


class Stopwatch:
    """The seconds of each phase, and the growth of memory over all of them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.memory = Phase()

    def measure(self, name: str, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns, and record its seconds."""
        start = time.perf_counter()
        result = compute()
        self.seconds[name] = time.perf_counter() - start
        return result


def main(file: str, folder: str, packs: str) -> None:
    """Plan a run of the rows of a file, and write what it took."""
    from datasets import Dataset  # imported before memory is measured

    accelerator = Accelerator(cpu=True)
    args: Any = SimpleNamespace(**ARGUMENTS)
    watch = Stopwatch()

    def read() -> Rows:
        dataset = Dataset.from_file(file)
        source = Source(file, None, "train", (Path(file),), is_required=True)
        split = Split(dataset, source, is_training=True)
        return keep_usable(dataset, split, ("max_length",), skip_bad_rows=False)

    rows = watch.measure("read and check", read)
    watch.measure("fingerprint", lambda: rows.fingerprint)
    lengths = rows.lengths
    lines = None
    if packs == "1":
        lines = watch.measure("pack", lambda: pack_rows(accelerator, lengths, CAPACITY))
    num_lines = len(rows) if lines is None else len(lines)

    def first_batch() -> Any:
        plan = BatchPlan(args, accelerator, num_lines)
        # In the middle of the third epoch: a resumed run skips nothing
        first_step = plan.total_steps * 5 // 6
        loader = plan.training_loader(rows, TokenCollator(0), first_step, 2, lines)
        return next(iter(loader))

    watch.measure("first batch", first_batch)
    result = {
        "rank": accelerator.process_index,
        "rows": len(rows),
        "lines": num_lines,
        "full": lengths.sum() / (num_lines * CAPACITY),
        "seconds": watch.seconds,
        "private_bytes": watch.memory.end()["private"],
        "shared_bytes": 0,
    }
    if lines is not None and accelerator.num_processes > 1:
        result["shared_bytes"] = lines.rows.nbytes + lines.starts.nbytes + lines.ends.nbytes
    Path(folder, f"{accelerator.process_index}.json").write_text(json.dumps(result))
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
