# SPDX-License-Identifier: Apache-2.0
"""A model that cannot be trained on the rows, or not as requested, is refused with a fix."""

from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    BitsAndBytesConfig,
    BloomConfig,
    CTRLConfig,
    Gemma2Config,
    GPT2Config,
    GPTJConfig,
    GPTNeoConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MixtralConfig,
    OpenAIGPTConfig,
    OPTConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RobertaConfig,
)

from components import model_checks
from components.cli import parse_arguments
from components.model_checks import (
    check_adapters,
    check_model,
    check_modules_to_save,
    check_output_head,
    check_running_statistics,
    check_under_strategy,
    size_of,
    warn_of_long_rows,
)
from components.strategy import Strategy
from example_arguments import ClassifierArguments, MixtureArguments, language_model_arguments
from fakes import fake_accelerator

TINY = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 16,
}
TINY_GPT2 = GPT2Config(n_layer=1, n_head=1, n_embd=8, n_positions=12, vocab_size=16)
# Tables of positions of each kind: an embedding, one behind an offset, and buffers of sines
WITH_TABLES = [
    TINY_GPT2,
    OPTConfig(**TINY, ffn_dim=8, word_embed_proj_dim=8, max_position_embeddings=12),
    BertConfig(**TINY, is_decoder=True, max_position_embeddings=12),
    OpenAIGPTConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, vocab_size=16),
    GPTJConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, rotary_dim=8, vocab_size=16),
    CTRLConfig(n_layer=1, n_head=1, n_embd=8, n_positions=12, dff=8, vocab_size=16),
]
BLOOM = BloomConfig(hidden_size=8, n_layer=1, n_head=1, vocab_size=16)
FLASH = ["--attn_implementation", "flash_attention_2"]


def shapes_of(config):
    """A causal language model without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def layout_of(flags):
    """How a recipe with such flags lays out its rows."""
    in_one_line = flags == FLASH
    return {"shares_lines": bool(flags), "gives_ends": in_one_line}


@pytest.mark.parametrize("flags", [["--packing"], ["--padding_free"], FLASH, []], ids=" ".join)
@pytest.mark.parametrize(
    ("config", "says"),
    [
        (LlamaConfig(num_hidden_layers=1), None),
        (BLOOM, "BloomForCausalLM"),  # knows no positions
        (OPTConfig(num_hidden_layers=1), "OPTForCausalLM"),  # takes them, and masks without
        (Qwen3Config(num_hidden_layers=1), None),
        (MistralConfig(num_hidden_layers=1), None),
        (Gemma2Config(num_hidden_layers=2), None),
        (GPT2Config(n_layer=1), None),
        (
            Qwen3NextConfig(num_hidden_layers=4),
            "linear_attention",
        ),  # its state goes from row to row
    ],
    ids=lambda value: value.model_type if hasattr(value, "model_type") else "",
)
def test_models_that_cannot_keep_packed_rows_apart_are_refused(config, says, flags, capsys):
    args = language_model_arguments(*flags)
    model = shapes_of(config)
    if says is None or not flags:
        check_model(args, model, 0, **layout_of(flags))
        return
    with pytest.raises(SystemExit, match="64"):
        check_model(args, model, 0, **layout_of(flags))
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "cure"),
    [
        (["--packing"], "leave out --packing, or take another model"),
        (["--padding_free"], "leave out --padding_free, or take another model"),
        (FLASH, "use --attn_implementation sdpa, or take another model"),
    ],
)
def test_the_way_out_is_the_flag_that_was_given(flags, cure, capsys):
    with pytest.raises(SystemExit, match="64"):
        check_model(language_model_arguments(*flags), shapes_of(BLOOM), 0, **layout_of(flags))
    assert (
        capsys.readouterr()
        .err.strip()
        .endswith(f"(its masks do not depend on position_ids): {cure}")
    )


def test_where_no_flag_makes_rows_share_a_line_another_model_is_the_way_out(capsys):
    with pytest.raises(SystemExit, match="64"):
        check_model(language_model_arguments(), shapes_of(BLOOM), 0, shares_lines=True)
    assert capsys.readouterr().err.strip().endswith("position_ids): take another model")


def test_packing_is_left_out_where_sequence_parallelism_cannot_tell_attention_the_rows(capsys):
    model = shapes_of(GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]]))
    layout = {"shares_lines": True, "gives_ends": True}
    with pytest.raises(SystemExit, match="64"):
        check_model(language_model_arguments("--packing"), model, 0, **layout)
    assert "to their attention): leave out --packing" in capsys.readouterr().err


def test_a_model_whose_attention_is_not_told_where_rows_end_is_refused(capsys):
    model = shapes_of(GPTNeoConfig(num_layers=1, attention_types=[[["global"], 1]]))
    # Its masks know positions
    check_model(language_model_arguments("--packing"), model, 0, shares_lines=True)
    with pytest.raises(SystemExit, match="64"):
        check_model(language_model_arguments(*FLASH), model, 0, **layout_of(FLASH))
    assert (
        "do not pass the ends of rows to their attention): use --attn_implementation sdpa"
        in capsys.readouterr().err
    )


def test_varlen_is_refused_once_for_models_for_which_it_would_be_wrong(capsys):
    args = language_model_arguments("--attn_implementation", "varlen")
    layout = {"shares_lines": True, "gives_ends": True}
    check_model(args, shapes_of(LlamaConfig(num_hidden_layers=1)), 0, **layout)
    with pytest.raises(SystemExit, match="64"):
        check_model(args, shapes_of(Qwen3NextConfig(num_hidden_layers=4)), 0, **layout)
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not work for Qwen3NextForCausalLM, since it has layers of linear_attention" in line


def test_liger_is_refused_where_it_has_left_the_model_as_it_was(capsys):
    args = language_model_arguments("--use_liger_kernel")
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    with pytest.raises(SystemExit, match="64"):
        check_model(args, model, 0)
    assert "Liger has no kernels for LlamaForCausalLM: leave it out" in capsys.readouterr().err
    kernel = type("LigerRMSNorm", (torch.nn.Identity,), {"__module__": "liger_kernel.rms_norm"})
    model.model.norm = kernel()
    check_model(args, model, 0)


class TestEmbeddings:
    def test_a_token_without_an_embedding_is_refused(self, capsys):
        args = language_model_arguments()
        model = LlamaForCausalLM(LlamaConfig(**TINY))
        check_model(args, model, 15)
        with pytest.raises(SystemExit, match="64"):
            check_model(args, model, 16)
        assert (
            "the rows have a token 16, but the model has no embedding for it"
            in capsys.readouterr().err
        )

    @pytest.mark.parametrize(
        ("pad_token_id", "places"), [(0, 31), (1, 30)], ids="padding is {}".format
    )
    def test_a_row_that_is_longer_than_the_positions_is_refused(self, pad_token_id, places, capsys):
        """RoBERTa's positions begin behind the one of padding, also where that is 0."""
        config = RobertaConfig(**TINY, max_position_embeddings=32, pad_token_id=pad_token_id)
        with torch.device("meta"):
            model = AutoModelForMaskedLM.from_config(config)
        args = parse_arguments(ClassifierArguments, words=[])
        check_model(args, model, 0, places)
        with pytest.raises(SystemExit, match="64"):
            check_model(args, model, 0, places + 1)
        assert (
            f"the longest row has {places + 1} tokens, but the model has positions for {places}: "
            f"use --max_length {places}"
        ) in capsys.readouterr().err

    def test_the_last_position_that_is_accepted_is_one_that_the_model_computes(self):
        config = RobertaConfig(**TINY, max_position_embeddings=32, pad_token_id=0)
        model = AutoModelForMaskedLM.from_config(config)
        model(torch.ones(1, 31, dtype=torch.long))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.ones(1, 32, dtype=torch.long))

    @pytest.mark.parametrize("config", WITH_TABLES, ids=lambda config: config.model_type)
    def test_each_kind_of_table_holds_what_is_accepted_and_no_more(self, config, capsys):
        args = language_model_arguments()
        check_model(args, shapes_of(config), 0, 12)
        with pytest.raises(SystemExit, match="64"):
            check_model(args, shapes_of(config), 0, 13)
        assert "model has positions for 12: use --max_length 12" in capsys.readouterr().err
        model = AutoModelForCausalLM.from_config(config)
        model(torch.ones(1, 12, dtype=torch.long))
        with pytest.raises((IndexError, RuntimeError)):
            model(torch.ones(1, 13, dtype=torch.long))

    @pytest.mark.parametrize("options", [{"target_modules": ["wpe"]}, {"modules_to_save": ["wpe"]}])
    def test_a_table_is_found_under_what_peft_puts_around_it(self, options, capsys):
        options = {"target_modules": ["c_attn"], "fan_in_fan_out": True} | options
        model = get_peft_model(AutoModelForCausalLM.from_config(TINY_GPT2), LoraConfig(**options))
        check_model(language_model_arguments(), model, 0, 12)
        with pytest.raises(SystemExit, match="64"):
            check_model(language_model_arguments(), model, 0, 13)

    def test_the_positions_of_images_limit_no_row(self):
        model = shapes_of(LlamaConfig(**TINY))
        model.vision_tower = torch.nn.ModuleDict({"position_embeddings": torch.nn.Embedding(4, 8)})
        check_model(language_model_arguments(), model, 0, 100)

    def test_an_encoder_is_not_trained_to_predict_what_it_sees(self, capsys):
        """A model from the hub, whose config nobody has read before."""
        model = shapes_of(BertConfig(**TINY))
        with pytest.raises(SystemExit, match="64"):
            check_model(language_model_arguments(), model, 0)
        says = "gpt2: a model of type bert is no causal language model: recipes/bert.py"
        assert says in capsys.readouterr().err
        check_model(parse_arguments(ClassifierArguments, words=[]), model, 0)

    def test_rotary_positions_have_no_end(self):
        check_model(language_model_arguments(), shapes_of(LlamaConfig(**TINY)), 0, 10**6)

    def test_rows_beyond_those_that_a_model_was_made_for_are_a_warning(self):
        model = shapes_of(LlamaConfig(**TINY, max_position_embeddings=2048))
        assert warn_of_long_rows(model, 2048) == ""
        assert warn_of_long_rows(model, 2049).startswith(
            "rows of 2,049 tokens are longer than the 2,048 positions that the model was made for: "
            "pass --max_length 2048"
        )
        assert warn_of_long_rows(shapes_of(BLOOM), 10**6) == ""


class TestMixture:
    @pytest.fixture
    def model(self):
        return shapes_of(MixtralConfig(**TINY, num_key_value_heads=1))

    def test_parameters_that_are_not_there_are_refused(self, model, capsys):
        words = ["--use_peft", "--lora_target_parameters", "experts.down_proj", "experts.w1"]
        args = parse_arguments(MixtureArguments, words=words)
        with pytest.raises(SystemExit, match="64"):
            check_model(args, model, 0)
        (line,) = capsys.readouterr().err.splitlines()
        assert "experts.w1: no parameter of MixtralForCausalLM has a name that ends with it" in line

    def test_parameters_that_have_adapters_already_are_found(self, model):
        words = ["--use_peft", "--lora_target_parameters", "experts.down_proj"]
        args = parse_arguments(MixtureArguments, words=words)
        options = {"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}
        check_model(args, get_peft_model(model, LoraConfig(**options)), 0)

    @pytest.mark.parametrize("flag", ["load_in_4bit", "load_in_8bit"])
    def test_one_of_which_little_would_be_quantized_is_refused(self, flag, tmp_path, capsys):
        names = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
        shape = dict.fromkeys(names, 1) | {"hidden_size": 64, "vocab_size": 64}
        args = language_model_arguments(f"--{flag}", "--use_peft")
        for config in (
            MixtralConfig(**shape, intermediate_size=256),
            LlamaConfig(**shape, intermediate_size=256),
        ):
            AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / config.model_type)
            quantization = BitsAndBytesConfig(**{flag: True})
            model = AutoModelForCausalLM.from_pretrained(
                tmp_path / config.model_type, quantization_config=quantization
            )
            if config.model_type == "llama":
                check_model(args, model, 0)
                continue
            with pytest.raises(SystemExit, match="64"):
                check_model(args, model, 0)
            assert "of MixtralForCausalLM are experts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (
            ["q_prj"],
            "--lora_target_modules q_prj: no layer of LlamaForCausalLM has this name: did you "
            "mean q_proj?",
        ),
        (["q_proj", "v_prj"], "--lora_target_modules v_prj"),  # peft would train q_proj only
        (
            ["nothing"],
            "has this name: Its linear layers are down_proj, gate_proj, k_proj, lm_head, o_proj, "
            "q_proj",
        ),
        (
            ["norm"],
            "--lora_target_modules norm: this is a LlamaRMSNorm of LlamaForCausalLM, which takes "
            "no adapter: Its",
        ),
        (["q_proj", "self_attn"], "--lora_target_modules self_attn: this is a LlamaAttention"),
    ],
)
def test_layers_that_the_model_has_not_are_named_with_those_it_has(names, says, capsys):
    with pytest.raises(SystemExit, match="64"):
        check_adapters(shapes_of(LlamaConfig(num_hidden_layers=1)), names)
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "names", [["all-linear"], ["q_proj", "v_proj"], ["mlp.up_proj"], ["embed_tokens"]]
)
def test_layers_that_it_has_are_not(names):
    check_adapters(shapes_of(LlamaConfig(num_hidden_layers=1)), names)


@pytest.mark.parametrize(
    ("name", "tied", "says"),
    [
        ("lm_haed", False, "no module of LlamaForCausalLM has this name: did you mean lm_head?"),
        ("act_fn", False, "it has no weights"),
        ("lm_head", True, "share their weight"),
        ("embed_tokens", True, "share their weight"),
    ],
)
def test_modules_that_cannot_be_trained_whole_are_told(name, tied, says, capsys):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=tied))
    with pytest.raises(SystemExit, match="64"):
        check_modules_to_save(model, [name])
    message = capsys.readouterr().err
    assert f"--modules_to_save {name}: " in message and says in message


def in_4_bits():
    return Linear4bit(8, 8, quant_storage=torch.float32)


def in_8_bits():
    layer = Linear8bitLt(8, 8, has_fp16_weights=False)
    layer.weight.data = layer.weight.data.to(torch.int8)
    return layer


@pytest.mark.parametrize("make", [in_4_bits, in_8_bits])
def test_a_quantized_module_cannot_be_trained_whole(make, capsys):
    """Also one in 4 bits that is stored as floating-point numbers, as the recipes store it."""
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY))
    quantized = make()
    model.set_submodule("model.layers.0.self_attn.q_proj", quantized)
    with pytest.raises(SystemExit, match="64"):
        check_modules_to_save(model, ["q_proj"])
    assert "--modules_to_save q_proj: it is quantized" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "model.norm"])
def test_modules_that_can_be_trained_whole_are_not(name):
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY, tie_word_embeddings=False))
    check_modules_to_save(model, [name])


class TestStrategy:
    FSDP1 = Strategy("FSDP1 FULL_SHARD", fsdp_version=1)
    FSDP2 = Strategy("FSDP2 FULL_SHARD", fsdp_version=2)
    ZERO1 = Strategy("DeepSpeed ZeRO-1", zero_stage=1)
    ZERO2 = Strategy("DeepSpeed ZeRO-2", zero_stage=2)
    ZERO3 = Strategy("DeepSpeed ZeRO-3", zero_stage=3)

    @pytest.fixture
    def under(self, monkeypatch):
        def under(strategy):
            monkeypatch.setattr(model_checks, "Strategy", SimpleNamespace(of=lambda _: strategy))
            return fake_accelerator()

        return under

    @pytest.mark.parametrize(
        ("strategy", "refused"),
        [
            (FSDP2, True),
            (ZERO1, True),
            (Strategy("DDP"), False),
            (Strategy("one process"), False),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_batch_norm_is_refused_where_ranks_would_have_statistics_of_their_own(
        self, strategy, refused, under, capsys
    ):
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
        if not refused:
            check_running_statistics(under(strategy), model)
            return
        with pytest.raises(SystemExit, match="64"):
            check_running_statistics(under(strategy), model)
        assert "use ddp.yaml" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("strategy", "adapters", "refused"),
        [
            (ZERO3, True, True),
            (FSDP1, True, True),
            (ZERO3, False, False),
            (FSDP2, True, False),
            (ZERO2, True, False),
            (Strategy("one process"), True, False),
        ],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_adapters_of_the_head_are_refused_where_each_piece_of_the_loss_would_gather_them(
        self, strategy, adapters, refused, under, capsys
    ):
        targets = ["q_proj", "lm_head"] if adapters else ["q_proj"]
        model = LlamaForCausalLM(LlamaConfig(**TINY | {"num_attention_heads": 2}))
        model = get_peft_model(model, LoraConfig(target_modules=targets))
        args = language_model_arguments("--use_peft")
        if not refused:
            check_output_head(under(strategy), args, model)
            return
        with pytest.raises(SystemExit, match="64"):
            check_output_head(under(strategy), args, model)
        assert "leave it out of --lora_target_modules" in capsys.readouterr().err

    def test_a_real_accelerator_is_asked_for_its_strategy(self, capsys):
        plugin = SimpleNamespace(zero_stage=3)
        accelerator = fake_accelerator(
            distributed_type=DistributedType.DEEPSPEED,
            state=SimpleNamespace(deepspeed_plugin=plugin, fsdp_plugin=None),
        )
        args = language_model_arguments()
        check_under_strategy(accelerator, args, torch.nn.Linear(2, 2))
        with pytest.raises(SystemExit, match="64"):
            check_under_strategy(accelerator, args, torch.nn.BatchNorm1d(2))
        assert "DeepSpeed ZeRO-3 does not keep their running" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [{}, {"load_in_4bit": True}, {"load_in_8bit": True}], ids=str)
def test_the_size_of_a_model_does_not_depend_on_how_it_is_stored(flags, tmp_path):
    shape = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 64)
    model = LlamaForCausalLM(LlamaConfig(**TINY | shape))
    model.save_pretrained(tmp_path)
    quantization = BitsAndBytesConfig(**flags) if flags else None
    stored = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=quantization)
    assert sum(size_of(weight) for weight in stored.parameters()) == model.num_parameters()
