# SPDX-License-Identifier: Apache-2.0
"""The pictures of README.md and docs/, drawn from results/ by evidence/draw.py.

    style         colors, sizes and SVG files that all pictures share
    recordings    what evidence/record_curves.py has written to results/curves.json
    real_runs     the runs that it launches
    catalog       all pictures by name

Each other module draws one topic. A picture is a function from a `Theme` to the text of an SVG.
"""

import paths  # noqa: F401  makes recipes/ importable
