# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show; conftest.py says how its cells run."""
