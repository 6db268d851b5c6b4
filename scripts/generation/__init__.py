# SPDX-License-Identifier: Apache-2.0
"""Text from trained models: the library of generate.py, chat.py, evaluate.py, merge.py, export.py.

loading      a trained folder: the model, or adapters on their base, the tokenizer, the run's record
contestants  models that are asked side by side, and the bases that they began with
answering    answers to conversations, also while they are shown
rows         rows of a file as questions with a reference, and exact match
serving      a server that is held against a trained folder
session      what generate.py does with its command line
comparing    a folder as it was trained, and how far another form of it is from that
merging      what merge.py does with its command line; joining is of checkpoints
exporting    what export.py does with its command line; ollama writes chat templates for it
"""

import paths  # noqa: F401  makes recipes/ importable
