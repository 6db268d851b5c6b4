# SPDX-License-Identifier: Apache-2.0
"""Which model families recipes/llama.py trains as transformers would: the library of
model_families.py.

Every module imports only what is listed above it:

    catalog     the families, each with a tiny configuration; catalog.yaml has them
    models      a random model of a family, its tokenizer and its rows
    own_loss    the loss that a model computes by itself
    launches    runs of the recipe
    tables      the rows as a table
    judge       what the runs and transformers say of a family, as one row
"""

import paths  # noqa: F401  makes recipes/ importable
