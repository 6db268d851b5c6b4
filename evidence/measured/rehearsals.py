# SPDX-License-Identifier: Apache-2.0
"""Rehearsals that measure memory: a recipe on CPU ranks, with a hook in each rank.

The planner's measurements reach the other packages of scripts/ only through this module.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

import job as jobs
import test_parity
from paths import CONFIGS, OF_EXPERTS, OF_PIPELINES, RECIPES, SCRIPTS
from proof import results

OUTPUT_SHOWN = 3000  # characters of a launch that failed
# (ranks, ranks of a pipeline, schedule, whether the stages are sharded)
PIPELINES = (
    (2, 2, "1f1b", False),
    (2, 2, "gpipe", False),
    (2, 2, "interleaved", False),
    (2, 2, "interleaved_zero_bubble", False),
    (2, 2, "zbv", False),
    (4, 4, "1f1b", False),
    (4, 2, "1f1b", False),
    (4, 2, "1f1b", True),
    (4, 2, "interleaved", True),
    (4, 2, "zbv", True),
)
QUIET = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


class Mesh(NamedTuple):
    """A shipped YAML on a number of ranks."""

    config: str
    ranks: int
    sizes: tuple[str, ...] = ()  # those of its mesh that are not the YAML's, as in "cp_size=4"
    ep: int = 1  # ranks that share the experts of a mixture
    pp: int = 1  # ranks of a pipeline
    schedule: str = "1f1b"  # --pipeline_schedule
    shards_stages: bool = False  # whether pipelines share the weights of their stages

    @property
    def recipe(self) -> str:
        """The recipe that runs under it."""
        if self.pp > 1:
            return "llama_pipeline.py"
        return "llama.py" if self.ep == 1 else "mixtral.py"

    @property
    def words(self) -> list[str]:
        """The flags of the recipe that belong to it."""
        if self.pp > 1:
            words = ["--pp_size", str(self.pp), "--pipeline_schedule", self.schedule]
            return [*words, "--shard_stages"] if self.shards_stages else words
        return [] if self.ep == 1 else ["--ep_size", str(self.ep)]


def config_names() -> list[str]:
    """Return the names of the shipped YAML files under which each rank has rows of its own."""
    return test_parity.configs()


def ranks_of(config: str, wanted: int) -> int:
    """Return the number of ranks closest to the wanted one that a YAML allows."""
    return test_parity.ranks_of(config, wanted)


def mesh_names() -> list[str]:
    """Return the names of the shipped YAML files under which ranks share rows."""
    return sorted({config for config, *_ in test_parity.MESHES})


def meshes(most_ranks: int) -> list[Mesh]:
    """Return the meshes in which ranks share rows, as evidence/parity.py runs them."""
    found = [Mesh(config, ranks, sizes) for config, ranks, sizes in test_parity.MESHES[:12]]
    return [mesh for mesh in found if mesh.ranks <= most_ranks]


def expert_names() -> list[str]:
    """Return the names of the shipped YAML files under which ranks share experts."""
    return sorted(path.stem for path in OF_EXPERTS)


def all_names() -> list[str]:
    """Return the names of the shipped YAML files, without those that mean the same as another."""
    return [*config_names(), *mesh_names(), *expert_names(), *pipeline_names()]


def expert_meshes() -> list[Mesh]:
    """Return the meshes in which ranks share experts, as evidence/parity.py runs them."""
    return [Mesh(config, ranks, ep=ep) for config, ranks, ep in test_parity.EXPERTS[:5]]


def pipeline_names() -> list[str]:
    """Return the names of the shipped YAML files under which ranks are stages of a pipeline."""
    return [OF_PIPELINES.stem]


def pipelines() -> list[Mesh]:
    """Return the pipelines whose memory is measured: every schedule, and every product."""
    return [
        Mesh(OF_PIPELINES.stem, ranks, pp=pp, schedule=schedule, shards_stages=shards)
        for ranks, pp, schedule, shards in PIPELINES
    ]


def content_of(config: str, sizes: Sequence[str]) -> dict[str, Any]:
    """Return the content of a shipped YAML, with these sizes of its mesh."""
    return jobs.content_of(config, tuple(sizes))


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine memory."""
    return results.versions()


def report_of(folder: Path) -> Path:
    """Return the shard report of a rehearsal that left its measurements in `folder`."""
    return folder.with_name(f"{folder.name}_report.json")


def make_model(folder: Path, shape: Mapping[str, int], *flags: str, kind: str = "llama") -> None:
    """Write a tiny model of a shape, and rows for it, into a folder."""
    command = [sys.executable, str(SCRIPTS / "make_tiny.py"), kind, str(folder)]
    command += [*flags, *words_of(shape)]
    subprocess.run(command, check=True, capture_output=True)


def words_of(flags: Mapping[str, Any]) -> list[str]:
    """Return {name: value} of flags as the words of a command line."""
    words = []
    for name, value in flags.items():
        words += [f"--{name}", str(value)]
    return words


def rehearse(
    mesh: Mesh,
    words: Sequence[str],
    variable: str,
    folder: Path,
    precision: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run a recipe under a shipped YAML; return what each rank measured.

    Args:
        mesh: the YAML and the number of ranks.
        words: of the recipe's command line, those of the mesh among them.
        variable: environment variable that makes each rank write one JSON file into `folder`.
        folder: a new folder.
        precision: mixed precision instead of the YAML's.
        environment: further variables.

    Raises RuntimeError with the end of the output if the run failed or a rank measured nothing.
    """
    folder.mkdir(parents=True)
    command = [sys.executable, SCRIPTS / "rehearse.py", "--num_processes", mesh.ranks]
    command += ["--report", report_of(folder)]
    if precision is not None:
        command += ["--mixed_precision", precision]
    file = CONFIGS / f"{mesh.config}.yaml"
    if mesh.sizes:
        file = folder.with_name(f"{folder.name}.yaml")
        content = jobs.content_of(mesh.config, mesh.sizes) | {"num_processes": mesh.ranks}
        file.write_text(yaml.safe_dump(content))
    command += ["--config_file", file, RECIPES / mesh.recipe, *words]
    done = subprocess.run(
        [str(word) for word in command],
        env={**os.environ, **QUIET, **(environment or {}), variable: str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    measured = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    if done.returncode or len(measured) != mesh.ranks:
        raise RuntimeError(done.stdout[-OUTPUT_SHOWN:])
    return measured
