# SPDX-License-Identifier: Apache-2.0
"""The quickstart of every recipe also teaches its model in bf16, to the bound of fp32."""

import pytest

from test_quickstarts import SHOWN, is_taught, run_quickstart

NAMES = {
    "exact_match": "exact match of at least {} on held-out rows",
    "eval_accuracy": "accuracy of at least {} on held-out rows",
    "eval_f1": "F1 of at least {} on names in held-out rows",
    "eval_bleu": "BLEU of at least {:.0f} on held-out rows",
    "eval_perplexity": "perplexity of at most {:.0f} on held-out texts",
}


@pytest.mark.parametrize("recipe", SHOWN)
def test_quickstart(recipe, cell):
    name, bound = SHOWN[recipe]
    told = NAMES[name].format(bound)
    if recipe == "vit":
        told = told.replace("rows", "images")
    claim = f"the quickstart of {recipe}.py also trains its model in bf16"
    cell.proves(f"recipes.{recipe}", claim, told)
    precision = "bf16" if cell.on_gpu else "no"
    row = run_quickstart(recipe, cell.work / "quickstart", precision)
    cell.rows.append(row | {"precision": precision})
    cell.commands.append(f"make quickstart-{recipe} PRECISION={precision}")
    assert is_taught(row)
