# SPDX-License-Identifier: Apache-2.0
"""The parts of scripts/push.py.

selection.py    which files of a folder are pushed, and why a folder is refused
card.py         the card of a run's result
private_text.py what must not be published of a text
copies.py       what is pushed in place of a file, and what the others tell of the machine
session.py      what is shown, the question, and the push
"""

import paths  # noqa: F401  makes recipes/ importable
