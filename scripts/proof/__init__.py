# SPDX-License-Identifier: Apache-2.0
"""What proves the recipes' promises on CPU ranks: parity, rehearsals, faults, warm starts.

scripts/parity.py uses `jobs`, `launch`, `compare` and `parity_table`, scripts/fault_injection.py
uses `trials` and `damage`, scripts/rehearse.py uses `rehearsal`, `ranks` and `shard_report`, and
scripts/warm.py uses the modules named `warm_*`. scripts/workarounds.py uses `workarounds`. Three
modules are programs that are started by path: `cpu_ranks` and `faults` instead of a recipe, and
`warm_python` instead of python.
"""

import paths  # noqa: F401  makes recipes/ importable
