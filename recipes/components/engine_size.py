# SPDX-License-Identifier: Apache-2.0
"""Whether a launch takes part in a run on as many hosts as its engine has given it.

A YAML with `num_machines: 1` on two hosts of a job would otherwise start two runs, which write to
the same output folder and know nothing of each other.
"""

from collections.abc import Iterator, Mapping

ENGINES = {
    "SLURM_STEP_NUM_NODES": "Slurm's step",
    "SKYPILOT_NUM_NODES": "SkyPilot's job",
    "PET_NNODES": "Kubernetes' TrainJob",
}


def find_other_size(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield a line with the fix if a launch is not for as many hosts as its engine has.

    Nothing is known of a launch that may restart, since its hosts may come and leave.

    Args:
        environment: the variables of a rank.
    """
    if environment.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        return
    hosts = environment.get("GROUP_WORLD_SIZE", "1")
    for variable, engine in ENGINES.items():
        of_engine = environment.get(variable, hosts)
        if of_engine.isdigit() and of_engine != hosts:
            yield (
                f"{engine} has {of_engine} hosts ({variable}), and this launch is for {hosts}: "
                "pass --num_machines and --machine_rank, as the files of clusters/ do, or unset "
                f"{variable} if each host is to train a run of its own"
            )
            return
