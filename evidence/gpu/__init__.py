# SPDX-License-Identifier: Apache-2.0
"""Library of evidence/gpu_proof.py: cells, how they are run one by one, and what they measure."""

import paths  # noqa: F401  makes recipes/ importable
