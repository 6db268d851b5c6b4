# SPDX-License-Identifier: Apache-2.0
"""A model that would be trained wrongly on the rows, or not as requested, is refused by name.

Each table has what looks alike and is taken, with an empty word.
"""

import pytest
import torch
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BitsAndBytesConfig,
    BloomConfig,
    CTRLConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    MixtralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Qwen3NextConfig,
    RobertaConfig,
)

from components.loading import build_without_weights, loading
from components.model_checks import (
    check_adapters,
    check_model,
    check_modules_to_save,
    check_output_head,
    check_running_statistics,
    warn_of_long_rows,
)
from components.tokens import load_tokenizer
from core.cli import parse
from core.summary import size_of
from example_arguments import ClassifierArguments, MixtureArguments, language_model_arguments
from fakes import under

TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 16,
}
LLAMA = LlamaConfig(**TINY)
BLOOM = BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16)
GPT2 = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=12, vocab_size=16)
GPT_NEO = GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]])
LINEAR = Qwen3NextConfig(num_hidden_layers=4)
PACKED = {"shares_lines": True}
IN_ONE_LINE = {"shares_lines": True, "gives_ends": True}


def shapes_of(config):
    """A causal language model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.fixture
def assert_refused(capsys):
    """A function that calls a check, which has to end with 64 and one line that names a word.

    An empty word: the check has to return.
    """

    def call(word, check, *arguments, **options):
        if not word:
            check(*arguments, **options)
            return
        with pytest.raises(SystemExit, match="64"):
            check(*arguments, **options)
        (line,) = capsys.readouterr().err.splitlines()
        assert word in line

    return call


# ---- Rows that share lines ----
@pytest.mark.parametrize(
    ("config", "flags", "layout", "word"),
    [
        (LLAMA, "--packing", PACKED, ""),
        (Gemma2Config(num_hidden_layers=2), "--packing", PACKED, ""),
        (GPT2, "--packing", PACKED, ""),
        (BLOOM, "--packing", PACKED, "--packing"),  # knows no positions
        (BLOOM, "--padding_free", PACKED, "--padding_free"),
        (BLOOM, "", {}, ""),
        (OPTConfig(num_hidden_layers=1), "--packing", PACKED, "OPTForCausalLM"),
        (LINEAR, "--packing", PACKED, "linear_attention"),  # its state goes from row to row
        (LINEAR, "--attn_implementation varlen", IN_ONE_LINE, "linear_attention"),
        (LLAMA, "--attn_implementation flash_attention_2", IN_ONE_LINE, ""),
        (GPT_NEO, "--packing", PACKED, ""),  # its masks know positions, its attention no ends
        (GPT_NEO, "--attn_implementation flash_attention_2", IN_ONE_LINE, "sdpa"),
    ],
    ids=lambda value: getattr(value, "model_type", None),
)
def test_models_that_cannot_keep_rows_of_a_line_apart(config, flags, layout, word, assert_refused):
    args = language_model_arguments(*flags.split())
    assert_refused(word, check_model, args, shapes_of(config), 0, **layout)


# ---- Tokens and positions ----
@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=12),
        BertConfig(**TINY, is_decoder=True, max_position_embeddings=12),
        OpenAIGPTConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, vocab_size=16),
        GPTJConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, rotary_dim=8, vocab_size=16),
        CTRLConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, dff=8, vocab_size=16),
    ],
    ids=lambda config: config.model_type,
)
def test_each_kind_of_table_of_positions_holds_what_is_accepted_and_no_more(config, assert_refused):
    args = language_model_arguments()
    assert_refused("", check_model, args, shapes_of(config), 0, 12)
    assert_refused("--max_length 12", check_model, args, shapes_of(config), 0, 13)
    model = AutoModelForCausalLM.from_config(config)
    model(torch.ones(1, 12, dtype=torch.long))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.ones(1, 13, dtype=torch.long))


@pytest.mark.parametrize(("pad_token_id", "places"), [(0, 31), (1, 30)])
def test_positions_behind_the_one_of_padding(pad_token_id, places, assert_refused):
    """RoBERTa's begin behind it, also where that is 0."""
    config = RobertaConfig(**TINY, max_position_embeddings=32, pad_token_id=pad_token_id)
    model = AutoModelForMaskedLM.from_config(config)
    args = parse(ClassifierArguments, words=[])
    assert_refused("", check_model, args, model, 0, places)
    assert_refused(f"--max_length {places}", check_model, args, model, 0, places + 1)
    model(torch.full((1, places), 2))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, places + 1), 2))


@pytest.mark.parametrize("options", [{"target_modules": ["wpe"]}, {"modules_to_save": ["wpe"]}])
def test_a_table_is_found_under_what_peft_puts_around_it(options, assert_refused):
    options = {"target_modules": ["c_attn"], "fan_in_fan_out": True} | options
    model = get_peft_model(AutoModelForCausalLM.from_config(GPT2), LoraConfig(**options))
    args = language_model_arguments()
    assert_refused("", check_model, args, model, 0, 12)
    assert_refused("12", check_model, args, model, 0, 13)


def test_tokens_without_an_embedding_and_rows_beyond_what_a_model_was_made_for(assert_refused):
    args = language_model_arguments()
    model = shapes_of(LLAMA)
    assert_refused("", check_model, args, model, 15, 10**6)  # rotary positions have no end
    assert_refused("token 16", check_model, args, model, 16)
    long = shapes_of(LlamaConfig(**TINY, max_position_embeddings=2048))
    assert warn_of_long_rows(long, 2048) == warn_of_long_rows(shapes_of(BLOOM), 10**6) == ""
    assert "--max_length 2048" in warn_of_long_rows(long, 2049)


def test_an_encoder_is_not_trained_to_predict_what_it_sees(assert_refused):
    """A model from the hub, whose config nobody has read before."""
    encoder = shapes_of(BertConfig(**TINY))
    assert_refused("recipes/bert.py", check_model, language_model_arguments(), encoder, 0)
    assert_refused("", check_model, parse(ClassifierArguments, words=[]), encoder, 0)


def test_liger_that_has_left_the_model_as_it_was(assert_refused):
    args = language_model_arguments("--use_liger_kernel")
    model = AutoModelForCausalLM.from_config(LLAMA)
    assert_refused("Liger", check_model, args, model, 0)
    kernel = type("LigerRMSNorm", (torch.nn.Identity,), {"__module__": "liger_kernel.rms_norm"})
    model.model.norm = kernel()
    assert_refused("", check_model, args, model, 0)


# ---- Experts ----
def test_experts_that_have_no_such_parameters(assert_refused):
    model = shapes_of(MixtralConfig(**TINY, num_key_value_heads=1))
    words = ["--use_peft", "--lora_target_parameters", "experts.down_proj"]
    args = parse(MixtureArguments, words=[*words, "experts.w1"])
    assert_refused("experts.w1", check_model, args, model, 0)
    options = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
    args = parse(MixtureArguments, words=words)
    assert_refused("", check_model, args, get_peft_model(model, LoraConfig(**options)), 0)


@pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
@pytest.mark.parametrize(("kind", "word"), [(MixtralConfig, "experts"), (LlamaConfig, "")])
def test_a_mixture_of_which_little_would_be_quantized(flag, kind, word, tmp_path, capsys):
    names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    shape = dict.fromkeys(names, 1) | {"hidden_size": 64, "vocab_size": 64}
    config = kind(**shape, intermediate_size=256)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path, quantization_config=BitsAndBytesConfig(**{flag: True})
    )
    args = language_model_arguments(f"--{flag}", "--use_peft")
    if not word:
        check_model(args, model, 0)
        return
    with pytest.raises(SystemExit, match="64"):
        check_model(args, model, 0)
    assert word in capsys.readouterr().err


# ---- Layers that are named ----
@pytest.mark.parametrize(
    ("names", "word"),
    [
        (["all-linear"], ""),
        (["mlp.up_proj"], ""),
        (["embed_tokens"], ""),
        (["q_prj"], "q_prj"),
        (["q_proj", "v_prj"], "v_prj"),  # peft would train q_proj only
        (["norm"], "LlamaRMSNorm"),
        (["q_proj", "self_attn"], "self_attn"),
    ],
)
def test_layers_that_take_no_adapter(names, word, assert_refused):
    assert_refused(word, check_adapters, shapes_of(LLAMA), names)


@pytest.mark.parametrize(
    ("name", "tied", "word"),
    [
        ("lm_head", False, ""),
        ("model.norm", False, ""),
        ("lm_haed", False, "lm_haed"),
        ("act_fn", False, "no weights"),
        ("lm_head", True, "share"),
        ("embed_tokens", True, "share"),
    ],
)
def test_modules_that_cannot_be_trained_whole(name, tied, word, assert_refused):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=tied))
    assert_refused(word, check_modules_to_save, model, [name])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantized_module_cannot_be_trained_whole(bits, assert_refused):
    """Also one in 4 bits that is stored as floating-point numbers, as the recipes store it."""
    quantized = Linear4bit(8, 8, quant_storage=torch.float32)
    if bits == 8:
        quantized = Linear8bitLt(8, 8, has_fp16_weights=False)
        quantized.weight.data = quantized.weight.data.to(torch.int8)
    model = AutoModelForCausalLM.from_config(LLAMA)
    model.set_submodule("model.layers.0.self_attn.q_proj", quantized)
    assert_refused("quantized", check_modules_to_save, model, ["q_proj"])


# ---- Strategies ----
@pytest.mark.parametrize(
    ("engine", "word"), [("FSDP2 FULL_SHARD", "ddp.yaml"), ("ZeRO-1", "ddp.yaml"), ("DDP", "")]
)
def test_batch_norm_where_ranks_would_have_statistics_of_their_own(engine, word, assert_refused):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    assert_refused(word, check_running_statistics, under(engine), model)


@pytest.mark.parametrize(
    ("engine", "targets", "word"),
    [
        ("ZeRO-3", ["q_proj", "lm_head"], "--lora_target_modules"),
        ("FSDP1 FULL_SHARD", ["q_proj", "lm_head"], "--lora_target_modules"),
        ("FSDP2 FULL_SHARD", ["q_proj", "lm_head"], ""),
        ("ZeRO-3", ["q_proj"], ""),
    ],
)
def test_adapters_of_the_head_where_each_piece_of_the_loss_would_gather_them(
    engine, targets, word, assert_refused
):
    model = get_peft_model(
        AutoModelForCausalLM.from_config(LLAMA), LoraConfig(target_modules=targets)
    )
    args = language_model_arguments("--use_peft")
    assert_refused(word, check_output_head, under(engine), args, model)


# ---- Loading ----
@pytest.mark.parametrize(
    ("what", "name", "error", "code"),
    [
        ("image processor", "nobody/nothing", OSError("no such"), 69),
        ("image processor", "nobody/nothing", KeyError("size"), 64),  # the hub was reached
        ("image processor", "./nothing", OSError("no such"), 64),
        ("model", "nobody/nothing", OSError("no such"), 64),  # its tokenizer was there
    ],
)
def test_only_a_hub_that_cannot_be_reached_has_its_own_code(what, name, error, code, capsys):
    with pytest.raises(SystemExit) as ended, loading(what, name):
        raise error
    assert ended.value.code == code
    assert name in capsys.readouterr().err.splitlines()[0]


def test_a_tokenizer_that_is_missing(tmp_path, assert_refused, capsys):
    LLAMA.save_pretrained(tmp_path)
    assert_refused("tokenizer.json", load_tokenizer, str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    assert_refused("no tokenizer: ", load_tokenizer, str(tmp_path))
    with pytest.raises(SystemExit, match="69"):
        load_tokenizer("nobody/nothing")


def test_a_model_of_another_kind(tmp_path, assert_refused):
    LLAMA.save_pretrained(tmp_path)
    options = {"dtype": "float32", "attn_implementation": None}

    def load():
        with loading("model", str(tmp_path)):
            build_without_weights(AutoModelForSeq2SeqLM, tmp_path, **options)

    assert_refused("recipes/llama.py", load)


def test_a_dry_run_has_the_shapes_of_the_model_and_reads_no_weights(tmp_path):
    BertConfig(**TINY).save_pretrained(tmp_path)  # and no weights
    model, report = build_without_weights(
        AutoModelForSequenceClassification,
        str(tmp_path),
        dtype="bfloat16",
        attn_implementation="eager",
        output_loading_info=True,
        ignore_mismatched_sizes=True,
        id2label={0: "a", 1: "b", 2: "c"},
        label2id={"a": 0, "b": 1, "c": 2},
    )
    assert model.classifier.out_features == 3 and report["missing_keys"] == []
    for weight in model.parameters():
        assert weight.is_meta and weight.dtype == torch.bfloat16


@pytest.mark.parametrize("flags", [{}, {"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_the_size_of_a_model_does_not_depend_on_how_it_is_stored(flags, tmp_path):
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY | shape))
    model.save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(**flags) if flags else None
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization)
    assert sum(size_of(weight) for weight in stored.parameters()) == model.num_parameters()
