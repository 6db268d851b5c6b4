# SPDX-License-Identifier: Apache-2.0
"""The model families, by the `model_type` of their configuration in transformers.

A family's settings are those in which its tiny configuration differs from SHARED. What makes a
family special is kept, and large enough to change the loss: a head that scales or caps its logits,
windows that are shorter than the rows, layers of several kinds, more experts than a token uses.
Dropout is off, since the loss of a model with dropout is random.
"""

from collections.abc import Mapping
from typing import Any

Settings = Mapping[str, Any]

# Names that nearly all configurations have, or map to names of their own
SHARED: Settings = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 256,
}
NUM_ROWS = 16  # of 20 to 50 tokens; all families are trained on them
WINDOW = 16  # tokens
HEAD = {"head_dim": 16}  # of families whose heads are not hidden_size / num_attention_heads wide
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
SLIDING_AND_FULL = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": WINDOW,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ROUTED_EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LATENT_ATTENTION = {
    "kv_lora_rank": 16,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}

FAMILIES: Mapping[str, Settings] = {
    # ---- One kind of layer, and attention over all tokens before ----
    "llama": {},
    "apertus": {},
    "arcee": {},
    "bitnet": {},
    "cwm": HEAD,
    "diffllama": {},
    "ernie4_5": HEAD,
    "glm": HEAD,
    "glm4": HEAD,
    "helium": HEAD,
    "hunyuan_v1_dense": HEAD,
    "nanochat": {"final_logit_softcapping": 2.0},
    "nemotron": {},
    "olmo": {"clip_qkv": 0.5},
    "olmo2": {},
    "persimmon": {},
    "phi": {},
    "phi3": {"sliding_window": WINDOW},
    "qwen2": {},
    "qwen3": HEAD,
    "seed_oss": HEAD | {"attention_dropout": 0.0, "residual_dropout": 0.0},
    "smollm3": {"no_rope_layers": [1, 0]},
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": WINDOW},
    # ---- Windows ----
    "mistral": {"sliding_window": WINDOW},
    "ministral": HEAD | SLIDING_AND_FULL,
    "exaone4": SLIDING_AND_FULL,
    "olmo3": SLIDING_AND_FULL,
    "modernbert-decoder": {"local_attention": WINDOW},
    # ---- Logits or hidden states that are scaled or capped ----
    "cohere": {"logit_scale": 0.25},
    "cohere2": SLIDING_AND_FULL | {"logit_scale": 0.25},
    "gemma": HEAD,
    "gemma2": HEAD
    | SLIDING_AND_FULL
    | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": HEAD | SLIDING_AND_FULL | {"query_pre_attn_scalar": 16},
    "gemma3n_text": HEAD
    | SLIDING_AND_FULL
    | {
        "final_logit_softcapping": 2.0,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "altup_correct_scale": False,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "gemma4_text": HEAD
    | SLIDING_AND_FULL
    | {
        "global_head_dim": 16,
        "final_logit_softcapping": 2.0,
        "vocab_size_per_layer_input": 320,
        "hidden_size_per_layer_input": 16,
    },
    "granite": {
        "logits_scaling": 4.0,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.1,
    },
    "vaultgemma": HEAD
    | SLIDING_AND_FULL
    | {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    # ---- Positions that are learned, or added to the attention ----
    "biogpt": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {},
    "codegen": NO_DROPOUT | {"rotary_dim": 8},
    "ctrl": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "dff": 128},
    "falcon": {},
    "gpt2": NO_DROPOUT,
    "gpt_bigcode": NO_DROPOUT,
    "gpt_neo": {
        "num_layers": 2,
        "num_heads": 4,
        "attention_types": [[["global", "local"], 1]],
        "window_size": WINDOW,
    },
    "gpt_neox": {},
    "gptj": NO_DROPOUT | {"rotary_dim": 8},
    "mpt": {},
    "openai-gpt": NO_DROPOUT,
    "opt": {"dropout": 0.0, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "xglm": {"dropout": 0.0, "attention_dropout": 0.0, "ffn_dim": 128},
    # ---- Mixtures of experts ----
    "deepseek_v2": ROUTED_EXPERTS | LATENT_ATTENTION,
    "deepseek_v3": ROUTED_EXPERTS | LATENT_ATTENTION,
    "dots1": ROUTED_EXPERTS,
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "glm4_moe": ROUTED_EXPERTS,
    "gpt_oss": HEAD | LOCAL_EXPERTS | SLIDING_AND_FULL,
    "granitemoe": LOCAL_EXPERTS
    | {"logits_scaling": 4.0, "embedding_multiplier": 6.0, "residual_multiplier": 0.5},
    "llama4_text": HEAD | LOCAL_EXPERTS | {"num_experts_per_tok": 1, "intermediate_size_mlp": 128},
    "minimax": HEAD | LOCAL_EXPERTS | {"block_size": 16},
    "mixtral": LOCAL_EXPERTS | {"sliding_window": WINDOW},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": LOCAL_EXPERTS | {"router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_moe": EXPERTS,
    # ---- Layers that carry a state along ----
    "bamba": {
        "attn_layer_indices": [1],
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "mamba_chunk_size": 16,
        "lm_head_multiplier": 0.25,
        "embedding_multiplier": 2.0,
    },
    "falcon_mamba": {"state_size": 8},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "num_experts": 4,
        "mamba_d_state": 8,
        "use_mamba_kernels": False,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    "mamba": {"state_size": 8},
    "mamba2": {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    "qwen3_5_text": HEAD | LINEAR_ATTENTION,
    "qwen3_next": HEAD | LINEAR_ATTENTION | EXPERTS | {"shared_expert_intermediate_size": 32},
    "recurrent_gemma": {
        "block_types": ["recurrent", "attention"],
        "attention_window_size": WINDOW,
        "logits_soft_cap": 2.0,
        "w_init_variance_scale": 1.0,
    },
    "rwkv": {"context_length": 256},
}
