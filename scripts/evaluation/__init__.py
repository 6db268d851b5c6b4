# SPDX-License-Identifier: Apache-2.0
"""Trained folders measured beside the bases that they began with: the library of evaluate.py.

rows         rows of a file: exact match and loss
harness      tasks of lm-evaluation-harness
session      what evaluate.py does
"""
