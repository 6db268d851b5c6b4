# SPDX-License-Identifier: Apache-2.0
"""Pictures and tables of runs, from the files in their folders: the library of plot_loss.py.

runs      what a run has written: its training steps, its evaluations, its arguments
curves    values over steps: of a metric, of the speed, smoothed
calls     the calls of a run that was resumed: how long each trained, and how fast
labels    in what runs differ, and how they are named
panels    which panels a picture has, and what cannot be shown
picture   the picture
table     the numbers of each run, as text and as JSON
session   what plot_loss.py does with its command line
"""

import paths  # noqa: F401  makes recipes/ importable
