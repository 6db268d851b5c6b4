# SPDX-License-Identifier: Apache-2.0
"""A launch ends at a setting of its YAML that would silently not be in force."""

from collections.abc import Iterator
from typing import Any

from core.config_names import find_launch
from extras.configs.rules import check


def before_accelerator(args: Any) -> Iterator[str]:
    """Yield a line with file, line, key, reason and fix for each error in the launched file."""
    launch = find_launch()
    if launch is None or launch.config_file is None:
        return
    for fault in check(launch.config_file, launch):
        if fault.severity == "error":
            yield str(fault)
