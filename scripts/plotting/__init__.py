# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of runs, from the files in their folders: the library of plot_loss.py.

runs      what a run has written, in what runs differ, and the table of their numbers
picture   the picture of one run or of several
"""

import paths  # noqa: F401  makes recipes/ importable
