# SPDX-License-Identifier: Apache-2.0
"""What the core calls of this extra (core/extras.py)."""

import os
from typing import Any

from core.exits import Exit, fail
from core.extras import InRun

# What an engine says of the hosts that it has started
SIZES = {
    "SLURM_STEP_NUM_NODES": "Slurm's step",
    "SKYPILOT_NUM_NODES": "SkyPilot's job",
    "PET_NNODES": "Kubernetes' TrainJob",
}


def in_run(args: Any) -> InRun | None:
    """Return what compares and watches the hosts of a run, or None with one process.

    Ends with 64 if the launch leaves out hosts of its engine: each host would train a run of its
    own in the same folder.
    """
    hosts = os.environ.get("GROUP_WORLD_SIZE", "1")
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
    for variable, engine in SIZES.items():
        has = os.environ.get(variable, hosts)
        # Hosts come and leave where ranks restart
        if restarts == "0" and has.isdigit() and has != hosts:
            fail(
                Exit.USAGE,
                f"{engine} has {has} hosts ({variable}), and this launch is for {hosts}: pass "
                "--num_machines and --machine_rank, as the files of clusters/ do",
            )
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    from extras.hosts.watch import Hosts  # torch takes a second

    return Hosts(args)
