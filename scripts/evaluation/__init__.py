# SPDX-License-Identifier: Apache-2.0
"""Trained folders in lm-evaluation-harness: the library of evaluate.py.

harness      lm-eval itself: that it is there, and runs no code of the hub
contestants  what is evaluated: trained folders, and the bases that they were trained from
documents    rows of a file as a model is asked them, and the tokens that are scored
own_rows     such documents as a task of lm-eval
tasks        lm-eval's own tasks, and YAML files
asking       a loaded model as lm-eval asks it
figures      a metric of a task: its value, its error, and how it differs from another model's
report       the files of the results, and the table
plot         the picture of the results
session      what evaluate.py does with its command line
"""

import paths  # noqa: F401  makes recipes/ importable
