# SPDX-License-Identifier: Apache-2.0
"""Two Llamas with one tokenizer, in FOLDER/model and FOLDER/teacher, and rows of seven skills.

The rows are those of llama. The teacher has learned nothing yet: train it with recipes/llama.py.
"""

from dataclasses import replace

from tiny import llama

MAKER = replace(llama.MAKER, num_rows=(14000, 280), has_teacher=True)
make_rows = llama.make_rows
