# SPDX-License-Identifier: Apache-2.0
"""What vLLM refuses, ignores, or serves otherwise, with the cure.

vLLM is not installed with this repository, since it asks for other versions of torch and of
transformers. The rules were read in the source of vLLM 0.33.0, in the file that each function
names. Others of its versions may have others: earlier ones ignored rank_pattern and alpha_pattern,
for example, where this one reads them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from merging.adapter import NOT_MERGED, PLAIN_STARTS
from merging.skeleton import PREFIX, shorten

VERSION = "0.33.0"
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # MaxLoRARanks in vllm/config/lora.py
# Most tokens of a vocabulary with adapters: create_lora_weights in
# vllm/lora/layers/logits_processor.py
LARGEST_VOCABULARY = 258048
# Endings of the tensors that an adapter may have: parse_fine_tuned_lora_name in vllm/lora/utils.py
ADAPTER_ENDINGS = (
    ".lora_A.weight",
    ".lora_B.weight",
    ".lora_embedding_A",
    ".lora_embedding_B",
)
# Tensors that are skipped, with what they changed: is_base_embedding_weights in vllm/lora/utils.py
SKIPPED_ENDINGS = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")
HEADS = ("embed_tokens", "lm_head")
EXPERTS = ".experts."  # in the name of every tensor of adapters of experts
PROJECTIONS = frozenset(
    ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
)
# {architecture: layers that may have adapters}, apart from HEADS: packed_modules_mapping and the
# linear layers in llama.py, mistral.py, qwen2.py, qwen3.py, gemma2.py, gemma3.py, phi3.py and
# mixtral.py of vllm/model_executor/models
LAYERS = {
    "LlamaForCausalLM": PROJECTIONS,
    "MistralForCausalLM": PROJECTIONS,
    "Qwen2ForCausalLM": PROJECTIONS,
    "Qwen3ForCausalLM": PROJECTIONS,
    "Gemma2ForCausalLM": PROJECTIONS,
    "Gemma3ForCausalLM": PROJECTIONS,
    "Phi3ForCausalLM": frozenset(["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),
    "MixtralForCausalLM": frozenset(["q_proj", "k_proj", "v_proj", "o_proj"]),
}
# Architectures whose HEADS may have adapters: embedding_modules in the same files
WITH_HEADS = frozenset(["LlamaForCausalLM", "Qwen3ForCausalLM", "MixtralForCausalLM"])
# QuantizationMethods in vllm/model_executor/layers/quantization/__init__.py lacks this one
NOT_QUANTIZED_BY = "bitsandbytes"


@dataclass(frozen=True)
class Finding:
    """Why vLLM cannot serve a folder as it was trained, and what cures it."""

    problem: str
    cure: str


@dataclass(frozen=True)
class Adapters:
    """What is checked of adapters.

    Attributes:
        folder: their name in a cure.
        config: adapter_config.json.
        shapes: {name: shape} of their tensors.
        base: the config of their base.
    """

    folder: str
    config: Mapping[str, Any]
    shapes: Mapping[str, Sequence[int]]
    base: Any

    @property
    def merge(self) -> str:
        """Return the cure that works for what merge.py merges."""
        return f"merge them: python scripts/merge.py {self.folder} {self.folder}-merged"

    @property
    def architecture(self) -> str:
        """Return the name of the class of the base."""
        return architecture_of(self.base)

    @property
    def rank(self) -> int:
        """Return the largest rank."""
        pattern = self.config.get("rank_pattern") or {}
        return max(int(self.config["r"]), *map(int, pattern.values()), 0)

    @property
    def layers(self) -> frozenset[str]:
        """Return the last part of the names of the layers with adapters."""
        found = set()
        for name in self.shapes:
            if name.endswith(ADAPTER_ENDINGS) and EXPERTS not in name:
                module = name.removeprefix(PREFIX).partition(".lora_")[0]
                found.add(module.rpartition(".")[2])
        return frozenset(found)


def find_in_adapters(adapters: Adapters) -> Iterator[Finding]:
    """Yield everything for which vLLM cannot serve adapters as they were trained."""
    yield from find_refused_options(adapters)
    yield from find_ignored_options(adapters)
    yield from find_large_rank(adapters)
    yield from find_other_tensors(adapters)
    yield from find_other_layers(adapters)
    yield from find_heads(adapters)
    yield from find_quantized(adapters.base)


def find_refused_options(adapters: Adapters) -> Iterator[Finding]:
    """Yield options of peft that vLLM refuses: _validate_features in vllm/lora/peft_helper.py."""
    config = adapters.config
    kind = config.get("peft_type")
    if kind != "LORA":
        yield Finding(f"they are of the type {kind}", "train LoRA, or put them into the model")
    if config.get("modules_to_save"):
        names = ", ".join(sorted(config["modules_to_save"]))
        yield Finding(f"modules_to_save has {names}", adapters.merge)
    if config.get("use_dora"):
        yield Finding("they are DoRA", adapters.merge)
    if config.get("bias", "none") != "none":
        yield Finding(f"they train biases (bias={config['bias']})", without("bias"))
    if config.get("init_lora_weights", True) not in PLAIN_STARTS:
        start = config["init_lora_weights"]
        yield Finding(
            f"they began with init_lora_weights={start}, which changed the base",
            "convert them with peft's path_initial_model_for_weight_conversion",
        )


def find_ignored_options(adapters: Adapters) -> Iterator[Finding]:
    """Yield further options that change what adapters do.

    Some are refused, and others are not read, so that vLLM would answer as another model
    (the fields of PEFTHelper in vllm/lora/peft_helper.py).
    """
    for option in NOT_MERGED:
        if adapters.config.get(option):
            yield Finding(f"they use {option}", without(option))


def without(option: str) -> str:
    """Return the cure for an option that merge.py does not merge either."""
    return f"train them again without {option}"


def find_large_rank(adapters: Adapters) -> Iterator[Finding]:
    """Yield a rank above the largest max_lora_rank: MaxLoRARanks in vllm/config/lora.py."""
    if adapters.rank > RANKS[-1]:
        yield Finding(
            f"their rank is {adapters.rank}, and the largest --max-lora-rank is {RANKS[-1]}",
            adapters.merge,
        )


def allowed_rank(rank: int) -> int:
    """Return the smallest --max-lora-rank for adapters, which may be at most RANKS[-1]."""
    return next(allowed for allowed in RANKS if allowed >= rank)


def find_other_tensors(adapters: Adapters) -> Iterator[Finding]:
    """Yield tensors beside the two matrices of each layer: from_lora_tensors in lora_model.py.

    Adapters of experts are one pair of matrices for all of them. vLLM has a place for such pairs in
    some models, under other names, and takes adapters of single experts in the others.
    """
    others = []
    experts = []
    for name in adapters.shapes:
        if EXPERTS in name:
            experts.append(name)
        elif not name.endswith((*ADAPTER_ENDINGS, *SKIPPED_ENDINGS)):
            others.append(name)
    # Those of DoRA are found by its option
    others = [name for name in others if "lora_magnitude_vector" not in name]
    if others and not adapters.config.get("modules_to_save"):
        yield Finding(f"they also have {shorten(sorted(others))}", adapters.merge)
    if experts:
        yield Finding(f"they adapt experts ({shorten(sorted(experts))})", adapters.merge)


def find_other_layers(adapters: Adapters) -> Iterator[Finding]:
    """Yield layers without a place for adapters: check_unexpected_modules in lora_model.py."""
    known = LAYERS.get(adapters.architecture)
    if known is None:
        return
    others = sorted(adapters.layers - known - set(HEADS))
    if others:
        yield Finding(
            f"they adapt {shorten(others)}, and vLLM adapts no such layers of "
            f"{adapters.architecture}",
            adapters.merge,
        )


def find_heads(adapters: Adapters) -> Iterator[Finding]:
    """Yield problems of adapters of the vocabulary: get_supported_lora_modules in utils.py."""
    vocabulary = text_config(adapters.base).vocab_size
    heads = sorted(adapters.layers & set(HEADS))
    if adapters.architecture in WITH_HEADS and vocabulary > LARGEST_VOCABULARY:
        yield Finding(
            f"their base has {vocabulary} tokens, and with adapters vLLM takes at most "
            f"{LARGEST_VOCABULARY}",
            adapters.merge,
        )
    if heads and adapters.architecture not in WITH_HEADS:
        where = adapters.architecture
        yield Finding(f"they adapt {' and '.join(heads)} of a {where}", adapters.merge)
    elif heads and text_config(adapters.base).tie_word_embeddings:
        yield Finding(f"they adapt {' and '.join(heads)}, which the base ties", adapters.merge)
    for name, shape in sorted(adapters.shapes.items()):
        if name.endswith(SKIPPED_ENDINGS) and shape[0] != vocabulary:
            yield Finding(
                f"they have {shape[0]} tokens in {name}, which vLLM skips, and the base has "
                f"{vocabulary}",
                "save the base with the larger vocabulary, and train on that",
            )


def find_quantized(config: Any) -> Iterator[Finding]:
    """Yield a quantization that vLLM does not know: _verify_quantization in vllm/config/model.py.

    Args:
        config: that of the model whose files vLLM loads.
    """
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return
    if not isinstance(quantization, Mapping):
        quantization = quantization.to_dict()
    method = quantization.get("quant_method", NOT_QUANTIZED_BY)
    method = getattr(method, "value", method)
    if method == NOT_QUANTIZED_BY:
        yield Finding(
            f"the files of the model are quantized by {method}, which vLLM {VERSION} does not load",
            "name the model that it was made from as the base, or save it in 16 bits",
        )


def find_in_model(config: Any, causal: frozenset[str]) -> Iterator[Finding]:
    """Yield for what vLLM does not serve a whole model as a language model.

    Args:
        config: that of the model.
        causal: names of the classes of causal language models.
    """
    name = architecture_of(config)
    if name not in causal:
        yield Finding(
            f"its class is {name or 'not named'}, which is no causal language model",
            "export a folder of recipes/llama.py, mistral_pretrain.py, mixtral.py or llama_dpo.py",
        )
    yield from find_quantized(config)


def find_large_vocabulary(config: Any, num_tokens: int) -> Iterator[Finding]:
    """Yield tokens of a tokenizer for which a model has no row of embeddings."""
    rows = text_config(config).vocab_size
    if num_tokens > rows:
        yield Finding(
            f"the tokenizer has {num_tokens} tokens, and the model {rows} rows of embeddings",
            "take the tokenizer that the model was trained with",
        )


def architecture_of(config: Any) -> str:
    """Return the name of the class that a config names, or "" if it names none."""
    names = getattr(config, "architectures", None) or [""]
    return str(names[0])


def text_config(config: Any) -> Any:
    """Return the part of a config that is about text."""
    return config.get_text_config()


def summarize(findings: Sequence[Finding]) -> str:
    """Return findings in one sentence: all problems, and then each cure once."""
    problems = "; ".join(finding.problem for finding in findings)
    cures = dict.fromkeys(finding.cure for finding in findings)
    return f"vLLM cannot serve it as it was trained: {problems}; {'; '.join(cures)}"
