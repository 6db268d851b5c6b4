# SPDX-License-Identifier: Apache-2.0
"""Whether accelerate's launcher has started less than it was asked for."""

import os

import psutil

from core.config_names import find_launcher

# The launcher exports them if it was asked for several processes or machines.
ADDRESS = ("MASTER_ADDR", "MASTER_PORT")


def started_one_of_several_processes() -> bool:
    """Return whether accelerate's launcher was to start several processes but started only one.

    The only trace is an address in the environment that the launcher does not have in its own.
    """
    launcher = find_launcher()
    if launcher is None or "ACCELERATE_USE_CPU" not in os.environ:
        return False
    process, _ = launcher
    try:
        before = process.environ()
    except (psutil.Error, OSError):  # It has ended, or belongs to another user.
        return False
    return any(os.environ.get(name) != before.get(name) for name in ADDRESS)
