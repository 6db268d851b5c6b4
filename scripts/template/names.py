# SPDX-License-Identifier: Apache-2.0
"""The names of files in a copied text: those that the copy lacks are marked as the original's."""

import re

ORIGIN_FOLDER = "ORIGIN/"  # stands for the folder of this repository, as ORIGIN.md explains
# The end of a recipe's docstring, which may be wrapped anywhere
COPYING = re.compile(
    r"yours:(\s+)python scripts/copy_recipe\.py \w+ my_project, then\s+look for\s+EDIT\."
)
EDITING = r"yours:\1look for EDIT."
# Not after a character of a path or an address, as in https://example.org/docs/
FILE = re.compile(r"(?<![\w/.-])(recipes|scripts|tests|docs|results|examples)/(?=(\w+))")


def rename_files(text: str, recipe: str) -> str:
    """Return a text in which every name of a file holds in the copy of a recipe.

    `recipes/llama.py` becomes `llama.py` in the copy of llama, and names of what is not copied get
    the prefix ORIGIN/: `ORIGIN/scripts/generate.py`.
    """

    def rename(found: re.Match[str]) -> str:
        folder, name = found.groups()
        if folder == "recipes" and name in (recipe, "RECIPE"):
            return ""
        return f"{ORIGIN_FOLDER}{folder}/"

    return FILE.sub(rename, COPYING.sub(EDITING, text))
