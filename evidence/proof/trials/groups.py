# SPDX-License-Identifier: Apache-2.0
"""All groups of trials, in the order of the report."""

from proof.trials import (
    damaged_files,
    dead_ranks,
    elastic,
    foreign_code,
    nonfinite,
    random_kills,
    signals,
    stops,
    writes,
)
from proof.trials.trial import Trial

TOPICS = (
    stops,
    elastic,
    signals,
    dead_ranks,
    random_kills,
    writes,
    damaged_files,
    foreign_code,
    nonfinite,
)
GROUPS = {group.name: group for topic in TOPICS for group in topic.GROUPS}


def trials_of(group: str, kills: int) -> list[Trial]:
    """Return the trials of a group, none if they are not possible on this machine.

    Args:
        kills: number of kills in the group "random kills".
    """
    if group in random_kills.TRIALS:
        return random_kills.TRIALS[group](kills)
    return GROUPS[group].trials() if GROUPS[group].is_possible() else []
