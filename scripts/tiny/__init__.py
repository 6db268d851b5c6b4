# SPDX-License-Identifier: Apache-2.0
"""Tiny random models, their tokenizers and rows, made offline: the library of make_tiny.py.

Every module imports only what is listed above it:

    words, chat      made-up words; special tokens and the chat template
    skills           questions about words and numbers, and their answers
    options          the options of each maker; checked before torch is imported
    tokenizers       byte-level BPE, BPE and WordPiece, trained on the rows
    output           the folder that a maker writes
    settings         settings that several models share
    images           drawn circles, crosses, squares and triangles
    X                the model and the rows that recipes/X.py trains on
    makers           all of them by recipe: make(recipe, folder, words)
"""

import paths  # noqa: F401  makes recipes/ importable
