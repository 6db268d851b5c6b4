# SPDX-License-Identifier: Apache-2.0
"""Trained folders measured beside the bases that they began with: the library of evaluate.py."""
