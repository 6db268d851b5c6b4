# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of runs, from the files in their folders: the library of plot_loss.py.

runs      what a run has written: its steps, evaluations, arguments and speed; in what runs differ
picture   the picture of one run or of several
session   what plot_loss.py does with its command line, and the table
"""

import paths  # noqa: F401  makes recipes/ importable
