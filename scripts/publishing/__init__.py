# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/push.py.

selection.py    which files of a folder are pushed, and why a folder is refused
session.py      what is shown, the question, and the push
"""
