# SPDX-License-Identifier: Apache-2.0
"""A GGUF is read back and compared with the folder that it was made of: faults in it are found."""

import shutil
from functools import partial

import numpy as np
import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from exporting import gguf_file, gguf_folder
from exporting.converter import Plan, merge_without_effect
from exporting.experts import find_places
from file_limits import largest_file
from gguf_files import rewrite
from merging import shards

END_OF_TURN = 3
QUERY = "blk.0.attn_q.weight"


def convert(model, outtype, folder):
    """Write a GGUF of a model's folder as export.py does, and keep its plan beside it."""
    folder.mkdir()
    gguf_file.convert(plan_of(model, folder / "model.gguf", outtype))


def test_a_full_disk_is_named_and_not_the_progress_of_the_converter(base, tmp_path, capsys):
    with largest_file(200_000), pytest.raises(SystemExit) as end:
        convert(base / "model", "f32", tmp_path / "full")
    error = capsys.readouterr().err
    assert end.value.code == 73
    assert error.startswith(f"error: cannot write {tmp_path}/full/model.gguf: OSError: ")


def plan_of(model, path, outtype="f32"):
    return Plan(str(model), str(path), outtype, "smollm", END_OF_TURN, adds_bos=False)


@pytest.fixture(scope="module")
def converted(base, once):
    """A function from a type of weights to a GGUF of the base."""

    def path_of(outtype):
        folder = once(f"gguf_{outtype}", partial(convert, base / "model", outtype))
        return folder / "model.gguf"

    return path_of


@pytest.fixture
def find_faults(base):
    """A function from a GGUF to all that is wrong with it."""
    model = base / "model"
    tokenizer = AutoTokenizer.from_pretrained(model)
    config = AutoConfig.from_pretrained(model)
    ends = frozenset({tokenizer.eos_token_id, END_OF_TURN})

    def find(path):
        found = gguf_file.read(path)
        faults = list(
            gguf_file.find_wrong_facts(
                found, tokenizer, tokenizer.chat_template, plan_of(model, path), ends
            )
        )
        compared = gguf_file.compare_tensors(found, model, config)
        assert compared.equal + len(compared.problems) > 0
        return [*faults, *compared.problems]

    return find


@pytest.mark.parametrize("outtype", ["f32", "f16", "bf16", "q8_0"])
def test_a_good_file_has_no_fault(outtype, converted, find_faults):
    assert find_faults(converted(outtype)) == []


def other(value):
    """Return a function that puts a value into the middle of a tensor."""

    def change(array):
        array = array.copy()
        array[array.shape[0] // 2] += value
        return array

    return change


def in_order_of_transformers(array):
    """Undo the order of llama.cpp's rotary embedding."""
    return array.reshape(2, 16, 2, 64).swapaxes(1, 2).reshape(array.shape)


FAULTS = {
    "one row differs a little": ({}, {QUERY: other(1e-3)}, "has other values"),
    "a tensor is not a number": ({}, {"output_norm.weight": other(np.nan)}, "has other values"),
    "queries in transformers' order": ({}, {QUERY: in_order_of_transformers}, "has other values"),
    "a norm that is off": ({}, {"blk.1.attn_norm.weight": other(0.5)}, "has other values"),
    "two tensors of one shape swapped": (
        {},
        {"blk.0.ffn_gate.weight": lambda array: array[::-1].copy()},
        "has other values",
    ),
    "a tensor too many": (
        {},
        {"blk.0.attn_q.bias": lambda _: np.zeros(64, np.float32)},
        "tensors that the folder lacks",
    ),
    "another shape": ({}, {QUERY: lambda array: array[:-2].copy()}, "has the shape"),
    "another chat template": ({"tokenizer.chat_template": "{{ messages }}"}, {}, "chat template"),
    "no chat template": ({"tokenizer.chat_template": None}, {}, "chat template"),
    "no end of turn": ({"tokenizer.ggml.eot_token_id": None}, {}, "end no answer"),
    "another end of text": ({"tokenizer.ggml.eos_token_id": 9}, {}, "end no answer"),
    "a token before each text": (
        {"tokenizer.ggml.add_bos_token": True},
        {},
        "a text begins",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault, converted, find_faults, tmp_path):
    fields, tensors, words = FAULTS[fault]
    path = rewrite(converted("f32"), tmp_path / "model.gguf", fields, tensors)
    faults = find_faults(path)
    assert len(faults) == 1
    assert words in faults[0]


def test_a_token_of_another_vocabulary_is_found(converted, find_faults, tmp_path):
    tokens = list(gguf_file.read(converted("f32")).tokens)
    tokens[20], tokens[21] = tokens[21], tokens[20]
    changed = {"tokenizer.ggml.tokens": tokens}
    path = rewrite(converted("f32"), tmp_path / "model.gguf", changed)
    (fault,) = find_faults(path)
    assert "token 20 is" in fault


def test_a_truncated_file_is_refused_in_one_line(converted, tmp_path, capsys):
    path = tmp_path / "model.gguf"
    content = converted("f32").read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(SystemExit) as ended:
        gguf_file.read(path)
    assert ended.value.code == 65
    assert capsys.readouterr().err.count("\n") == 1


def test_a_tokenizer_that_the_converter_does_not_know_is_named(base, tmp_path, capsys):
    plan = plan_of(base / "model", tmp_path / "model.gguf")
    with pytest.raises(SystemExit) as ended:
        gguf_file.convert(Plan(**{**vars(plan), "pre_tokenizer": None}))
    assert ended.value.code == 65
    assert "does not know how this tokenizer cuts words" in capsys.readouterr().err
    assert (tmp_path / gguf_file.LOG).is_file()


def test_tied_weights_are_compared_once(tied, tmp_path, once):
    folder = once("gguf_tied", partial(convert, tied / "model", "f32"))
    found = gguf_file.read(folder / "model.gguf")
    config = AutoConfig.from_pretrained(tied / "model")
    assert gguf_file.compare_tensors(found, tied / "model", config).problems == ()
    written_twice = rewrite(
        folder / "model.gguf",
        tmp_path / "model.gguf",
        tensors={"output.weight": lambda _: np.zeros((320, 64), np.float32)},
    )
    compared = gguf_file.compare_tensors(gguf_file.read(written_twice), tied / "model", config)
    assert "output.weight" in compared.problems[0]


# ---- Experts ----
GATES = "blk.0.ffn_gate_exps.weight"


@pytest.fixture(scope="module")
def converted_mixture(mixture, once):
    """A function from a type of weights to a GGUF of the mixture."""

    def path_of(outtype):
        fill = partial(convert, mixture / "model", outtype)
        return once(f"gguf_mixture_{outtype}", fill) / "model.gguf"

    return path_of


@pytest.fixture(scope="module")
def mixture_of(mixture, once):
    """A function from a layout of the experts to a folder of the mixture with it."""

    def save_fused(folder):
        model = AutoModelForCausalLM.from_pretrained(mixture / "model")
        model.save_pretrained(folder, save_original_format=False)

    def folder_of(layout):
        if layout == "hub":
            return mixture / "model"
        return once("exporting_fused_mixture", save_fused)

    return folder_of


def compare(path, folder):
    return gguf_file.compare_tensors(
        gguf_file.read(path), folder, AutoConfig.from_pretrained(folder)
    )


@pytest.mark.parametrize("outtype", ["f32", "bf16", "q8_0"])
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_every_expert_is_compared_in_either_layout(layout, outtype, mixture_of, converted_mixture):
    folder = mixture_of(layout)
    names = shards.find_files(str(folder), "main").names
    assert any(name.endswith("experts.gate_up_proj") for name in names) == (layout == "fused")
    path = converted_mixture(outtype)
    compared = compare(path, folder)
    assert compared.problems == compared.unknown == ()
    assert compared.equal == len(gguf_file.read(path).tensors)


def with_swapped_experts(array):
    return array[[1, 0, *range(2, len(array))]].copy()


def changed_at_end(array):
    array = array.copy()
    array[-1, -1, -1] += 1e-3
    return array


EXPERT_FAULTS = {
    "two experts swapped": (with_swapped_experts, "has other values"),
    "one value of the last expert": (changed_at_end, "has other values"),
    "an expert too few": (lambda array: array[:-1].copy(), "experts"),
    "an expert too many": (lambda array: np.concatenate([array, array[:1]]), "experts"),
}


@pytest.mark.parametrize("kind", ["gate", "up", "down"])
@pytest.mark.parametrize("layout", ["hub", "fused"])
def test_two_swapped_experts_are_found(layout, kind, mixture_of, converted_mixture, tmp_path):
    own = f"blk.1.ffn_{kind}_exps.weight"
    path = rewrite(
        converted_mixture("f32"), tmp_path / "model.gguf", tensors={own: with_swapped_experts}
    )
    (problem,) = compare(path, mixture_of(layout)).problems
    assert problem.startswith(f"model.gguf: {own} has other values")


@pytest.mark.parametrize("fault", EXPERT_FAULTS)
def test_a_fault_of_an_expert_is_found(fault, mixture_of, converted_mixture, tmp_path):
    change, words = EXPERT_FAULTS[fault]
    path = rewrite(converted_mixture("f32"), tmp_path / "model.gguf", tensors={GATES: change})
    compared = compare(path, mixture_of("hub"))
    (problem,) = compared.problems
    assert problem.startswith(f"model.gguf: {GATES} ") and words in problem
    assert compared.equal == len(gguf_file.read(path).tensors) - 1


def test_gates_in_the_place_of_ups_are_found(mixture_of, converted_mixture, tmp_path):
    gates = np.array(gguf_file.read(converted_mixture("f32")).tensors[GATES].data)
    changed = {GATES.replace("gate", "up"): lambda _: gates}
    path = rewrite(converted_mixture("f32"), tmp_path / "model.gguf", tensors=changed)
    for layout in ("hub", "fused"):
        assert len(compare(path, mixture_of(layout)).problems) == 1


def test_fused_experts_of_a_layout_that_is_not_known_are_listed_and_not_judged():
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert find_places(name, "gpt-oss") == []
    assert [place.own for place in find_places(name, "qwen3moe")] == [
        GATES,
        GATES.replace("gate", "up"),
    ]


def test_a_merge_without_effect_makes_no_token_of_the_vocabulary():
    assert merge_without_effect(["a", "~"]) == "~ ~"
    assert merge_without_effect([b"~~", "^^"]) == "` `"


def test_marks_of_training_are_left_out_of_the_template():
    template = "{% generation %}{{ m.content }}{%- endgeneration -%}"
    assert gguf_folder.GENERATION_MARKS.sub("", template) == "{{ m.content }}"


def test_a_folder_keeps_its_own_template_when_another_one_is_converted(base, tmp_path):
    before = (base / "model" / "tokenizer_config.json").read_bytes()
    gguf_file.link_model(tmp_path / "linked", base / "model", "{{ messages }}")
    linked = AutoTokenizer.from_pretrained(tmp_path / "linked")
    assert linked.chat_template == "{{ messages }}"
    assert (base / "model" / "tokenizer_config.json").read_bytes() == before
    shutil.rmtree(tmp_path / "linked")
    assert (base / "model" / "config.json").is_file()
