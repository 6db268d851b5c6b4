# SPDX-License-Identifier: Apache-2.0
"""A trained folder becomes one that another program loads: the library of export.py."""

import paths  # noqa: F401  makes recipes/ importable
