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
    """The trials of a group.

    Args:
        kills: number of kills in the group "random kills".
    """
    if group == "random kills":
        return random_kills.trials(kills)
    return GROUPS[group].trials()
