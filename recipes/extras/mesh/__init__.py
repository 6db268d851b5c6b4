# SPDX-License-Identifier: Apache-2.0
"""Ranks that share the rows (tensor parallelism), or the tokens of a row (context, sequence)."""
