"""The published pages: their marks, and tables of what was measured."""

import pytest

from bench.quickstarts import read_rows, read_taught, write_rows
from publish import memory, pages, strategies


def test_a_readme_without_a_mark_is_refused():
    with pytest.raises(ValueError, match="needs one <!-- quickstarts -->"):
        pages.fill("no marks", pages.read_results())


def test_a_yaml_has_its_place_by_its_kind():
    names = ["deepspeed_zero3", "fsdp1_no_shard", "fsdp2_full_shard", "ddp", "single"]
    expected = ["single", "ddp", "fsdp2_full_shard", "fsdp1_no_shard", "deepspeed_zero3"]
    assert sorted(names, key=strategies.rank_of) == expected
    with pytest.raises(ValueError, match="a new kind"):
        strategies.rank_of("pipeline")


def test_the_largest_difference_is_of_the_runs_that_report_one():
    rows = [{"differences": {"loss": value}} for value in (1e-7, None, 3e-6)]
    assert strategies.largest(rows, "loss") == "3e-06"
    assert strategies.largest(rows[1:2], "loss") == ""


def test_bytes_show_the_fullest_rank_and_its_share():
    held = {"shards": 4, "ranks": [[1000, 1000], [1200, 1000]]}
    assert strategies.bytes_text(held) == "1,200 (1/4)"
    assert strategies.bytes_text(held | {"shards": 1}) == "1,200"
    assert strategies.bytes_text(None) == ""


@pytest.mark.parametrize(
    ("error", "text"), [(0.01234, "+1.23%"), (-0.01234, "-1.23%"), (-1e-6, "+0.00%")]
)
def test_an_error_has_its_sign(error, text):
    assert memory.signed(error) == text


# ---- Quick examples ----


def row(recipe, seconds=1.0):
    return {"recipe": recipe, "shown": "accuracy", "before": 0.5, "after": 0.9, "seconds": seconds}


def test_rows_of_other_recipes_stay_and_keep_their_order(tmp_path):
    path = tmp_path / "quickstarts.json"
    write_rows(path, [row("vit"), row("llama")])
    write_rows(path, [row("vit", 2.0), row("bert")])
    assert read_rows(path) == [row("llama"), row("bert"), row("vit", 2.0)]


def test_what_an_example_taught_is_read_from_its_answers_or_its_evaluations(tmp_path):
    (tmp_path / "before.json").write_text('{"exact_match": 0.1}')
    (tmp_path / "after.json").write_text('{"exact_match": 0.9}')
    taught = read_taught("llama", tmp_path)
    assert (taught.before, taught.after) == (0.1, 0.9)
    folder = tmp_path / "bert"
    (folder / "run").mkdir(parents=True)
    lines = ['{"eval_accuracy": 0.4}', '{"loss": 1.0}', '{"eval_accuracy": 0.8}']
    (folder / "run" / "metrics.jsonl").write_text("\n".join(lines))
    taught = read_taught("bert", folder)
    assert (taught.before, taught.after) == (0.4, 0.8)
