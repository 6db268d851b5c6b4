# SPDX-License-Identifier: Apache-2.0
"""Documents are read as they are; one that cannot be used is named by file, line, cause and fix."""

import json

import datasets
import pytest

from example_arguments import DocumentFlags
from tasks.stream import open_documents

GOOD = '{"text": "w1 w2 w3"}\n'
BAD_LINES = {  # line, and what is said of it
    "not JSON": ('{"text": "w1', "is not JSON"),
    "no text column": (
        '{"body": "w1"}',
        "has the columns body; needs text: name yours by --columns text=COLUMN",
    ),
    "a number": ('{"text": 5}', "has no text in text: 5"),
    "half a character": (r'{"text": "w1\ud800"}', "surrogates not allowed"),
}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A folder for documents; datasets' cache is empty at first."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


def opened(source, eval_strategy="no", **changes):
    """Return the documents to train on and those to evaluate on."""
    return open_documents(DocumentFlags(str(source), eval_strategy=eval_strategy, **changes))


def texts_of(documents):
    """Return all texts, by the number of their document."""
    numbered = enumerate(documents.dataset, documents.num_before + 1)
    return {number: documents.text_of(row, number) for number, row in numbered}


# ---- Which documents ----
@pytest.mark.parametrize("streaming", [False, True])
def test_the_first_documents_are_held_out(streaming, data):
    lines = [json.dumps({"text": f"w{number}"}) for number in range(1, 6)]
    (data / "train.jsonl").write_text("\n".join(lines))
    chosen = {"num_eval_documents": 2, "streaming": streaming}
    documents, held_out = opened(data, "steps", **chosen)
    assert texts_of(held_out) == {1: "w1", 2: "w2"}
    assert texts_of(documents) == {3: "w3", 4: "w4", 5: "w5"}
    documents, held_out = opened(data, **chosen)
    assert held_out is None and list(texts_of(documents)) == [3, 4, 5]


# ---- Bad documents ----
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_named_or_left_out(name, streaming, data):
    line, says = BAD_LINES[name]
    (data / "train-0.jsonl").write_text(GOOD * 3)
    (data / "train-1.jsonl").write_text(f"{GOOD}\n{line}\n{GOOD}")
    documents, _ = opened(data, streaming=streaming)
    with pytest.raises(ValueError) as raised:
        texts_of(documents)
    for words in (f"{data}/train-1.jsonl, line 3: ", says, "--skip_bad_rows"):
        assert words in str(raised.value)
    documents, _ = opened(data, streaming=streaming, skip_bad_rows=True)
    assert list(texts_of(documents).values())[3:] == ["w1 w2 w3", "", None, "w1 w2 w3"]


# ---- What is known of documents that are not all read ----
def test_names_and_sizes_of_files_tell_whether_they_are_others(data):
    path = data / "train.jsonl"
    path.write_text(GOOD * 3)
    documents, _ = opened(path)
    known = documents.fingerprint
    held_out = opened(path, num_eval_documents=1)[0]
    assert documents.fingerprint == opened(path)[0].fingerprint == held_out.fingerprint == known
    path.write_text(GOOD * 2)
    assert opened(path)[0].fingerprint != known
    other = path.rename(data / "train-0.jsonl")
    assert opened(other)[0].fingerprint != known
