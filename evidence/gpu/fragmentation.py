# SPDX-License-Identifier: Apache-2.0
"""Memory that the allocator holds above what tensors take."""

from . import probed
from .cell import Outcome, Row, Setup
from .probed import Probed, model_and_rows

SEGMENTS = {
    "as it is": {},
    "expandable": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
}


def of_ragged_rows(setup: Setup) -> Outcome:
    """Train on rows of varying length, with segments of a fixed size and with expandable ones."""
    sizes = {"per_device_train_batch_size": 4, "max_length": 2048}
    flags = model_and_rows(setup, "1B", sizes, rows="gsm8k").flags
    outcome = Outcome(ok=True)
    for name, variables in SEGMENTS.items():
        job = Probed(name, flags, steps=12, variables=variables)
        reading = probed.run(setup, job)
        row: Row = {"segments": name, "result": reading.result}
        peaks = reading.peaks
        if "allocated" in peaks:
            for kind in ("allocated", "active", "reserved"):
                row[f"{kind}, GiB"] = round(peaks[kind] / 2**30, 2)
            row["reserved to allocated"] = round(peaks["reserved"] / peaks["allocated"], 3)
        outcome.require(not reading.failed)
        outcome.rows.append(row)
        outcome.commands.append(reading.command)
        setup.keep(outcome)
    return outcome
