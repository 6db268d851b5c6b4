# SPDX-License-Identifier: Apache-2.0
"""How much memory a training run takes, worked out before anything is loaded.

One micro-batch of the recipe runs on fake tensors, which have shapes but no bytes, and is cut into
phases at the model's layers. What an engine adds is arithmetic over the phases. The modules in
reading order; each imports only modules above it:

    plan        what a call of plan_memory.py and a YAML determine: batch, engine, precision, card
    model       the recipe's model and loss on fake tensors
    trace       what they hold, as a Profile of phases
    engines     what one process, DDP, FSDP and DeepSpeed hold around each phase
    answer      the plan of one config, or what fits a card, as text and JSON
"""

import paths  # noqa: F401  recipes/ becomes importable
