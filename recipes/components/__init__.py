# SPDX-License-Identifier: Apache-2.0
"""What recipes are made of: one topic per module, in layers.

A recipe imports what it needs by name, `from components.tokens import load_tokenizer`, since Python
puts a script's folder first on its path. `python scripts/copy_recipe.py llama my_project` copies a
recipe together with the modules that it reaches. A module imports only from layers below its own
(tests/unit/test_recipes.py holds it to that).
"""
