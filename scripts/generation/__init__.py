"""Text from trained models: the library of generate.py and continue_text.py.

loading      a trained folder: the model, or adapters on their base, and the tokenizer
answering    answers to conversations
questions    rows of a file as questions with a reference, read as the recipe reads them
scoring      exact match, for all rows and for each skill
"""

import paths  # noqa: F401  makes recipes/ importable
