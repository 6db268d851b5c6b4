# SPDX-License-Identifier: Apache-2.0
"""Rehearsals on CPU ranks: what differs from production, the ranks, and the shard report.

`cpu_ranks` is a program that is started in place of the recipe in each rank.
"""

import paths  # noqa: F401  makes recipes/ importable
