# SPDX-License-Identifier: Apache-2.0
"""What is trained on in a text, which rows form a batch, what is wrong in a config: all as recorded
in tests/golden/, before the code that decides it was rewritten.
"""

import zlib
from pathlib import Path

import numpy as np
import pytest
import trl

import golden_subjects
from chat_templates import CONVERSATIONS, said_by

TEMPLATES = sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))
# Answers that readers of JSON or of Jinja like to take for something else
ODD = ["[]", "{}", "null", "0", "1.50", "true", "{{ x }}", " a ", "a\n\nb", "[[a]]"]
ODD_ANSWERS = {
    f"answer {answer!r}": ([said_by("user", "Hi."), said_by("assistant", answer)], [])
    for answer in ODD
}


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_what_is_trained_on_under_a_template(path, golden):
    template = path.read_text()
    row = {}
    for name, (messages, tools) in (CONVERSATIONS | ODD_ANSWERS).items():
        row[name] = golden_subjects.trained_text(template, messages, tools)
    golden.check("templates", path.stem, row)


LENGTHS = np.random.default_rng(0).integers(1, 200, 103).tolist()
SAMPLING = ("random", "sequential", "group_by_length")


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("number", [1, 7, 12, 100, 103])
def test_which_rows_form_a_batch(sampling, number, golden):
    row = {}
    for batch in (1, 3, 8):
        for accumulation in (1, 4):
            for ranks in (1, 2, 3, 4):
                for seed in (0, 42):
                    cut = (batch, accumulation, ranks, seed)
                    found = golden_subjects.batches(LENGTHS[:number], sampling, *cut, epochs=2)
                    row[" ".join(map(str, cut))] = [len(found), zlib.crc32(repr(found).encode())]
    golden.check("plans", f"{sampling} {number}", row)


@pytest.mark.parametrize("width", [200, 256, 512, 4096])
def test_which_rows_are_packed_together(width, golden):
    found = golden_subjects.packed(LENGTHS, width)
    golden.check("plans", f"packed {width}", [len(found), zlib.crc32(repr(found).encode())])
