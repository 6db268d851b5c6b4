# SPDX-License-Identifier: Apache-2.0
"""The plan of a rehearsal: how many ranks it starts, and what it has to change in the YAML."""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from config_strategy import ConfigStrategy, read, strategy_of

PROGRAM = Path(__file__).with_name("cpu_ranks.py")  # starts each rank


@dataclass(frozen=True)
class Override:
    """A setting that differs from the YAML."""

    name: str  # an option of accelerate launch
    old: str
    new: str
    reason: str


@dataclass(frozen=True)
class Rehearsal:
    """A YAML, and the ranks on which it is rehearsed."""

    config_file: str
    facts: ConfigStrategy  # the strategy that the YAML requests
    device: str  # cpu or cuda
    ranks: int  # on all machines
    ranks_per_node: int
    overrides: list[Override]
    machines: int = 1

    def command(self, options: Sequence[str], words: Sequence[str]) -> list[str]:
        """Return the command that launches the ranks of this machine.

        Args:
            options: of accelerate launch; without a port the ranks meet at a free one.
            words: the recipe and its arguments.
        """
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        command += ["--config_file", self.config_file, "--main_process_port", "0", *options]
        for change in self.overrides:
            command += [f"--{change.name}", change.new]
        return [*command, str(PROGRAM), *words]

    def environment(self, folder: Path) -> dict[str, str]:
        """Return the environment of the ranks, which leave what they measure in `folder`."""
        environment = {"OMP_NUM_THREADS": "1"} | os.environ
        environment["REHEARSAL_FOLDER"] = str(folder)
        environment["REHEARSAL_DEVICE"] = self.device
        environment["REHEARSAL_RANKS_PER_NODE"] = str(self.ranks_per_node)
        if self.device == "cpu":
            environment["ACCELERATE_TORCH_DEVICE"] = "cpu"
            environment["DS_ACCELERATOR"] = "cpu"
            environment["CUDA_VISIBLE_DEVICES"] = ""
        return environment


def plan(config_file: str, device: str, launch: Namespace) -> Rehearsal:
    """Plan the rehearsal of a YAML, some of whose values options of a launch may replace.

    Raises:
        ValueError: if the file is no config, or the ranks would not show its sharding. Whether
            accelerate does what it says is checked by the recipe that is launched with it.
    """
    config = read(config_file, launch)
    facts = strategy_of(config)
    ranks = config.number("num_processes", 1)
    if device == "cpu" and "num_processes" not in launch.nondefault:
        ranks = fewest_ranks(facts)
    machines = config.machines if "num_machines" in launch.nondefault else 1
    ranks_per_node = ranks
    if device == "cpu":
        ranks_per_node = ranks // max(machines, 2)
        if facts.groups_are_machines and ranks_per_node < 2:
            raise ValueError(
                f"HYBRID_SHARD needs 2 nodes of 2 or more ranks, not {ranks} ranks: with 1 per "
                "node torch neither shards nor averages gradients"
            )
    overrides = []

    def change(name: str, default: str, new: str, reason: str) -> None:
        old = config.text(name, default)
        if new != old:
            overrides.append(Override(name, old, new, reason))

    change("num_processes", "1", str(ranks), "one rank would show nothing")
    change("num_machines", "1", str(machines), "all ranks run here")
    if machines == 1:
        change("machine_rank", "0", "0", "all ranks run here")
    # The launcher cannot change the precision of a DeepSpeed JSON
    if device == "cpu" and "mixed_precision" not in launch.nondefault and config.json is None:
        reason = "slow on CPU; --mixed_precision bf16 also shows what bf16 refuses"
        change("mixed_precision", "no", "no", reason)
    return Rehearsal(config_file, facts, device, ranks, ranks_per_node, overrides, machines)


def fewest_ranks(facts: ConfigStrategy) -> int:
    """Return the fewest ranks that show a strategy."""
    if facts.places:
        return facts.places
    if facts.groups_are_machines:
        return 4
    return 1 if facts.engine == "single" else 2
