# SPDX-License-Identifier: Apache-2.0
"""Results of other versions of the libraries are not mixed with new ones, nor lost silently."""

import json

from proof import results


def test_rows_of_the_same_versions_are_read(tmp_path, capsys):
    results.write_rows(tmp_path / "a.json", [{"name": "x"}])
    assert results.read_rows(tmp_path / "a.json") == [{"name": "x"}]
    assert capsys.readouterr().err == ""


def test_rows_of_other_versions_are_left_out_and_the_versions_are_named(tmp_path, capsys):
    path = tmp_path / "a.json"
    results.write_rows(path, [{"name": "x"}, {"name": "y"}])
    content = json.loads(path.read_text())
    content["versions"]["torch"] = "1.0"
    path.write_text(json.dumps(content))
    assert results.read_rows(path) == []
    told = capsys.readouterr().err
    assert f"{path}: 2 rows of other versions are replaced: " in told and '"torch": "1.0"' in told
