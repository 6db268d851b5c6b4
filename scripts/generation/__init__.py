# SPDX-License-Identifier: Apache-2.0
"""Text from trained models: the library of generate.py, chat.py, continue_text.py, and others.

loading      a trained folder: the model, or adapters on their base, and the tokenizer
answering    answers to conversations
streaming    answers that are shown while they are generated, and can be stopped
recorded     the run.json beside a result, or what of it is on the hub
questions    rows of a file as questions with a reference, read as the recipe reads them
printing     answers on a terminal, without control characters
continuing   what continue_text.py does with its command line
scoring      exact match, for all rows and for each skill
session      what generate.py does with its command line
trained      a folder as it was trained, and what it says to prompts
merging      what merge.py does with its command line
exporting    what export.py does with its command line; ollama writes chat templates for it
"""

import paths  # noqa: F401  makes recipes/ importable
