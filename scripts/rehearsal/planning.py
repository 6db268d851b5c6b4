# SPDX-License-Identifier: Apache-2.0
"""The plan of a rehearsal: how many ranks it starts, and what it has to change in the YAML."""

import os
import sys
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

    @property
    def ranks_here(self) -> int:
        """How many of the ranks this machine starts."""
        return self.ranks // self.machines

    def command(self, words: list[str], port: int, meeting: Sequence[str] = ()) -> list[str]:
        """Return the command that launches the ranks of this machine.

        Args:
            words: the recipe and its arguments.
            port: where the ranks meet; 0 for a free one.
            meeting: options of accelerate launch that say how several machines meet.
        """
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        command += ["--config_file", self.config_file]
        for change in self.overrides:
            command += [f"--{change.name}", change.new]
        command += ["--main_process_port", str(port), *meeting]
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


def plan(
    config_file: str,
    device: str,
    num_processes: int | None = None,
    mixed_precision: str | None = None,
    num_machines: int | None = None,
) -> Rehearsal:
    """Plan the rehearsal of a YAML; the numbers and the precision take the place of the YAML's.

    Raises:
        ValueError: if the file is no config, or the ranks would not show its sharding. Whether
            accelerate does what it says is checked by the recipe that is launched with it.
    """
    config = read(config_file)
    facts = strategy_of(config)
    ranks = num_processes or default_ranks(config, facts, device)
    machines = num_machines or 1
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
        old = str(config.get(name, default))
        if new != old:
            overrides.append(Override(name, old, new, reason))

    reason = "requested" if num_processes else "one rank would show nothing"
    change("num_processes", "1", str(ranks), reason)
    if config.get("num_machines", 1) > 1 and not num_machines:
        change("num_machines", "1", "1", "all ranks run here")
        change("machine_rank", "0", "0", "all ranks run here")
    # The launcher cannot change the precision of a DeepSpeed JSON
    is_in_json = "deepspeed_config_file" in config.get("deepspeed_config", {})
    if mixed_precision:
        change("mixed_precision", "no", mixed_precision, "requested")
    elif device == "cpu" and not is_in_json:
        reason = "slow on CPU; --mixed_precision bf16 also shows what bf16 refuses"
        change("mixed_precision", "no", "no", reason)
    return Rehearsal(config_file, facts, device, ranks, ranks_per_node, overrides, machines)


def default_ranks(config: dict, facts: ConfigStrategy, device: str) -> int:
    """Return the default number of ranks: on CPU, the fewest that show the strategy."""
    if device != "cpu":
        return config.get("num_processes", 1)
    if facts.places:
        return facts.places
    if facts.groups_are_machines:
        return 4
    return 1 if facts.engine == "single" else 2
