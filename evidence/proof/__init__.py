# SPDX-License-Identifier: Apache-2.0
"""What proves the recipes' promises on CPU ranks: parity, rehearsals, faults, warm starts.

evidence/parity.py uses `jobs`, `launch`, `compare` and `parity_table`, evidence/fault_injection.py
uses `trials`, `damage` and `faults`, a program that is started in place of a recipe.
"""

import paths  # noqa: F401  makes recipes/ importable
