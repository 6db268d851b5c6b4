# SPDX-License-Identifier: Apache-2.0
"""Library of evidence/benchmark.py: cells, how they are run and measured, and what they show."""

import paths  # noqa: F401  makes recipes/ importable
