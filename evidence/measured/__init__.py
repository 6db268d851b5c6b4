# SPDX-License-Identifier: Apache-2.0
"""Planned memory against what ranks hold: on CPU tensors, under every YAML, and on the host."""

import paths  # noqa: F401  makes recipes/ importable
