# SPDX-License-Identifier: Apache-2.0
"""What a cell of the GPU proof writes."""

import json

import pytest

from gpu.cell import write_json


def test_a_record_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"x": 1})
    with pytest.raises(TypeError):
        write_json(path, {"x": object()})
    assert json.loads(path.read_text()) == {"x": 1}
