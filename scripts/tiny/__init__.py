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
    llama            a Llama or a Mixtral, and rows of skills
    preferences      a Llama, and a right and a wrong answer for each question
    text             a Mistral with a sliding window, and short stories
    bert, t5, vit    a model of that kind, and its rows or images
    bert_ner         the BERT, and sentences with names
    makers           all of them by recipe: make(recipe, folder, words)
"""

import paths  # noqa: F401  makes recipes/ importable
