# SPDX-License-Identifier: Apache-2.0
"""What the host does for a run: optimizer steps of offloaded state, and reading images."""

import os

from bench import machine
from proof.launch import data_of

from . import launches, probed
from .cell import Outcome, Row, Setup
from .probed import Probed, model_and_rows

# Flags of make_tiny.py for a ViT-base and its rows
IMAGE_MODEL = (
    "--hidden_size 768 --num_hidden_layers 12 --num_attention_heads 12 --intermediate_size 3072 "
    "--image_size 224 --patch_size 16 --num_train_rows 2048 --num_test_rows 16"
)
TINY_IMAGE_MODEL = "--num_train_rows 64 --num_test_rows 16"


def offload_threads(setup: Setup) -> Outcome:
    """Offload with one thread and with one per core, since AdamW then runs on the host."""
    cores = os.cpu_count() or 1
    sizes = {"per_device_train_batch_size": 1, "max_length": 1024}
    flags = model_and_rows(setup, "1B", sizes).flags
    configs = ["fsdp2_cpu_offload"]
    if machine.version_of("deepspeed"):
        configs.append("deepspeed_zero2_offload")
    outcome = Outcome(ok=True)
    for config in configs:
        one_thread = None  # seconds per step
        for threads in (1, cores):
            variables = {"OMP_NUM_THREADS": str(threads)}
            job = Probed(f"{config} {threads}", flags, config=config, variables=variables)
            reading = probed.run(setup, job)
            row: Row = {"YAML": config, "threads": threads, "result": reading.result}
            if reading.seconds_per_step:
                if one_thread is None:
                    one_thread = reading.seconds_per_step
                row["seconds per step"] = round(reading.seconds_per_step, 3)
                row["times faster"] = round(one_thread / reading.seconds_per_step, 2)
            outcome.require(not reading.failed)
            outcome.commands.append(f"OMP_NUM_THREADS={threads} {reading.command}")
            outcome.rows.append(row)
            setup.keep(outcome)
    return outcome


def image_workers(setup: Setup) -> Outcome:
    """Train a ViT-base with 0, 8 and 16 processes that read images."""
    shape = TINY_IMAGE_MODEL if setup.tiny else IMAGE_MODEL
    steps = 4 if setup.tiny else 25
    batch = 4 if setup.tiny else 64
    numbers = (0, 1) if setup.tiny else (0, 8, 16)
    folder = launches.made(setup.models / "images", ["vit", *shape.split()])
    words = [str(word) for word in data_of(folder)]
    flags = launches.as_flags(words) | {"per_device_train_batch_size": batch}
    outcome = Outcome(ok=True)
    without = None  # seconds per step without worker processes
    for workers in numbers:
        own = flags | {"dataloader_num_workers": workers}
        job = Probed(f"{workers} workers", own, "recipes/vit.py", steps)
        reading = probed.run(setup, job)
        row: Row = {"workers": workers, "result": reading.result}
        if reading.seconds_per_step:
            if without is None:
                without = reading.seconds_per_step
            row["images/s"] = round(batch / reading.seconds_per_step)
            row["times faster"] = round(without / reading.seconds_per_step, 2)
        outcome.require(not reading.failed)
        outcome.rows.append(row)
        outcome.commands.append(reading.command)
        setup.keep(outcome)
    return outcome
