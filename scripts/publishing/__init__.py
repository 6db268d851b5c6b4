# SPDX-License-Identifier: Apache-2.0
"""The parts of push.py.

folder       which files of a folder are pushed, why it is refused, its card and its record
session      what is shown, the question, and the push
"""

import paths  # noqa: F401  makes recipes/ importable
