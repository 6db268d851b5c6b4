# SPDX-License-Identifier: Apache-2.0
"""The types of weights in a GGUF."""

# Those that llama.cpp's converter writes, and those that its quantizer makes of them
CONVERTED = ("f32", "f16", "bf16", "q8_0")
QUANTIZED = ("q6_k", "q5_k_m", "q5_k_s", "q4_k_m", "q4_k_s", "q3_k_m", "q2_k", "iq4_xs")
OF_DTYPE = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
