# SPDX-License-Identifier: Apache-2.0
"""How much memory a training run takes, worked out before anything is loaded.

One micro-batch of the recipe runs on fake tensors, which have shapes but no bytes, and is cut into
phases at the model's layers. What an engine adds is arithmetic over the phases. The modules in
reading order; each imports only modules above it:

    request     a call of plan_memory.py, the model's config, the micro-batch and the card
    plan        what a YAML and arguments determine: engine, sharding, precision
    trace       the recipe's model and loss on fake tensors, as a Profile of phases
    engines     what one process, DDP, FSDP and DeepSpeed hold around each phase
    choose      every way to run that fits a card, the cheapest first
    answer      from a request to its answer, as text and JSON
"""

import paths  # noqa: F401  recipes/ becomes importable
