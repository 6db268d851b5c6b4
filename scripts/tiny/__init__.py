# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, their tokenizers and rows, made offline: the library of make_tiny.py.

Every module imports only what is listed above it:

    maker     what a recipe's maker says of its model and of its rows, and made-up words for these
    X         the maker of recipes/X.py: its model and its rows
    models    random models, and tokenizers that are trained on the rows
    smollm2   a real model of 135 million parameters, from a package
    makers    all makers by recipe: make(recipe, folder, words)
"""

import paths  # noqa: F401  makes recipes/ importable
