# SPDX-License-Identifier: Apache-2.0
"""What cannot be a store, and what a store's client raises, is explained."""

import pytest

from components.store_transport import Transport, find_url_problem
from object_memory import URL


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("runs/full", "write it as s3://BUCKET/RUN"),
        ("s3://", "write it as s3://BUCKET/RUN"),
        ("nosuch://bucket/run", "fsspec knows no nosuch://"),
        ("memory://bucket/run", "is lost when the run ends"),
        (URL, None),
    ],
)
def test_wrong_urls_are_explained(url, says):
    problem = find_url_problem(url)
    assert problem is None if says is None else says in problem


@pytest.mark.parametrize(
    ("error", "says"),
    [
        # As s3fs raises it for NoSuchBucket
        (FileNotFoundError("The specified bucket does not exist"), "The specified bucket does not"),
        (FileNotFoundError(2, "No such file or directory", "runs/a.json"), "'runs/a.json'"),
    ],
)
def test_what_was_not_found_is_said(error, says):
    code, text = Transport(URL).describe(error)
    assert code == 73 and text.startswith(f"--output_url {URL}: not found: ") and says in text
    assert ("bucket does" in text) == ("bucket does" in says)


def test_a_wrong_url_ends_with_64_and_one_line(new_process, capsys):
    with pytest.raises(SystemExit, match="64"):
        Transport("memory://bucket/run")
    said = capsys.readouterr().err
    assert said.startswith("error: --output_url memory://bucket/run: ") and said.count("\n") == 1
