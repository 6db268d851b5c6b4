# SPDX-License-Identifier: Apache-2.0
"""Several hosts: what they must have in common, and which of them no longer answers."""
