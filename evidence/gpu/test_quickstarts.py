# SPDX-License-Identifier: Apache-2.0
"""The quickstart of every recipe also teaches its model in bf16, to the bound of fp32."""

import pytest

from test_quickstarts import SHOWN, is_taught, run_quickstart


@pytest.mark.parametrize("recipe", SHOWN)
def test_quickstart(recipe, cell):
    name, bound = SHOWN[recipe]
    side = "most" if name == "eval_perplexity" else "least"
    told = f"{name.removeprefix('eval_')} of at {side} {bound:g} on held-out rows"
    claim = f"the quickstart of {recipe}.py also trains its model in bf16"
    cell.proves(f"recipes.{recipe}", claim, told)
    precision = "bf16" if cell.on_gpu else "no"
    row = run_quickstart(recipe, cell.work / "quickstart", precision)
    cell.rows.append(row | {"precision": precision})
    assert is_taught(row)
