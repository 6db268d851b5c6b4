# SPDX-License-Identifier: Apache-2.0
"""The cache of prepared rows knows the rules by which each recipe refuses a row."""

from pathlib import Path

import bert
import bert_ner
import llama
import llama_dpo
import vit
from components import chat_template, columns, conversations, messages
from components.fingerprints import ReachedCode, read_definitions
from components.rows import attempt


def rules_in(module):
    """The names of a module's rules of a row, and of what they go by."""
    kinds = ("validate", "refuse", "check", "find", "is_empty", "shorten", "list_columns")
    kinds += ("parse_line", "explain", "normalize", "TOOL", "TRAINED", "SAID")
    definitions = read_definitions(Path(module.__file__).resolve())
    return {name for name in definitions if name.startswith(kinds)}


def test_all_rules_of_a_row_are_reached_from_the_recipes():
    """What is kept in the cache follows from functions that a recipe calls for a row."""
    reached = ReachedCode()
    for function in (
        llama.tokenize_row,
        llama_dpo.tokenize_answers,
        bert.tokenize_text,
        bert_ner.tokenize_words,
        vit.label_image,
        attempt,
    ):
        reached.add(Path(function.__code__.co_filename).resolve(), function.__name__)
    known = {code.partition(":")[0] for code in reached.code}
    rules = rules_in(conversations) | rules_in(messages) | rules_in(chat_template)
    rules |= rules_in(columns) | {"check_image", "parse_line", "explain"}
    assert {"find_tools", "is_empty", "TOOL_COLUMNS", "normalize_call", "SAID_KEYS"} < rules
    assert rules <= known
