# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, their tokenizers and rows, made offline: the library of make_tiny.py.

X.py is the maker of recipes/X.py: its model and its rows.
"""

import paths  # noqa: F401  makes recipes/ importable
