# SPDX-License-Identifier: Apache-2.0
"""A model folder and a data set cannot run their own code, as SECURITY.md says."""

import ast
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

import damage
from core import weights
from core.data import open_rows
from core.engine import Layout
from core.model import load_tokenizer
from fakes import fake_accelerator, small_llama
from generation import loading
from launching import REPO, edit_json

LOADED = SimpleNamespace(dtype="auto", device="cpu", load_in_4bit=False)
PROGRAMS = sorted([*(REPO / "recipes").rglob("*.py"), *(REPO / "scripts").rglob("*.py")])
CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"


@pytest.fixture
def mark(tmp_path):
    """The file that planted code makes."""
    return tmp_path / "mark"


@pytest.fixture
def model(tmp_path):
    """The folder of a tiny Llama with its tokenizer."""
    folder = tmp_path / "model"
    LlamaForCausalLM(small_llama(vocab_size=4)).save_pretrained(folder)
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "<pad>": 2, "?": 3}, unk_token="?"))
    FastTokenizer(tokenizer_object=words, pad_token="<pad>").save_pretrained(folder)
    return folder


def find_unsafe_calls(text):
    """The calls in a program that might run code of a model or a pickle, as (line, name)."""
    found = []
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call):
            continue
        name = ast.unparse(call.func)
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        trusts = given.get("trust_remote_code", "False") != "False"
        # Without it transformers asks on the terminal; **options have it in the caller
        asks = name.startswith("Auto") and name.endswith(".from_pretrained")
        asks = asks and not {"trust_remote_code", None} & given.keys()
        unpickles = name in ("pickle.load", "pickle.loads", "dill.load", "dill.loads")
        unpickles |= name == "torch.load" and given.get("weights_only") != "True"
        if trusts or asks or unpickles:
            found.append((call.lineno, name))
    return found


def test_no_program_calls_what_runs_code_of_a_model_or_a_pickle():
    found = {path: find_unsafe_calls(path.read_text()) for path in PROGRAMS}
    assert {path: calls for path, calls in found.items() if calls} == {}
    for planted in (
        "AutoModel.from_pretrained(name)",
        "load(name, trust_remote_code=True)",
        "pickle.load(file)",
        "torch.load(path)",
    ):
        assert find_unsafe_calls(planted)


# ---- Code of a model ----
def test_the_code_of_a_model_is_not_run(model, mark):
    (model / "modeling_x.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    edit_json(model / "config.json", auto_map=classes)
    weights.load_pretrained(
        AutoModelForCausalLM, Layout(fake_accelerator()), str(model), trust_remote_code=False
    )
    loading.load_model(loading.Source(str(model)), LOADED)
    edit_json(model / "config.json", model_type="x")  # no other code could load it
    with pytest.raises(SystemExit, match="65"):
        loading.load_model(loading.Source(str(model)), LOADED)
    assert not mark.exists()


def test_the_code_of_a_tokenizer_is_not_run(model, mark):
    (model / "tokenization_x.py").write_text(CODE.format(mark=str(mark)))
    classes = {"AutoTokenizer": [None, "tokenization_x.X"]}
    edit_json(model / "tokenizer_config.json", auto_map=classes)
    load_tokenizer(SimpleNamespace(model_name_or_path=str(model), model_revision="main"))
    assert not mark.exists()


# ---- Pickles ----
@pytest.mark.parametrize("plant", [damage.torch_pickle, damage.plain_pickle])
@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_a_pickle_in_the_place_of_weights_is_refused(name, plant, model, mark):
    (model / "model.safetensors").unlink()
    plant(model / name, mark)
    with pytest.raises(Exception):  # noqa: B017  each reader raises one of its own
        weights.load_pretrained(
            AutoModelForCausalLM, Layout(fake_accelerator()), str(model), trust_remote_code=False
        )
    with pytest.raises(SystemExit, match="65"):
        loading.load_model(loading.Source(str(model)), LOADED)
    assert not mark.exists()


# ---- Data sets ----
def test_the_script_of_a_data_set_is_not_run(tmp_path, mark, capsys):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(CODE.format(mark=str(mark)))
    with pytest.raises(SystemExit, match="65"):
        open_rows(str(folder), None, "train", True)
    assert not mark.exists() and "rows" in capsys.readouterr().err
