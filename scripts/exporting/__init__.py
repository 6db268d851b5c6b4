# SPDX-License-Identifier: Apache-2.0
"""A trained folder becomes one that another program loads: the library of export.py.

origin          the trained folder, and the prompts that it is asked
gguf_folder     a GGUF, with a Modelfile for Ollama, and their receipt
gguf_file       the GGUF: made, read back, compared
converter       llama.cpp's converter, in a process of its own; quantizer the same
pre_tokenizers  how tokenizers cut words, by llama.cpp's names
llama_cpp_run   what llama.cpp answers
turns           a chat template as what stands around each turn
ollama          the Modelfile
vllm            a folder for vLLM; vllm_rules what vLLM refuses
outtypes        the types of weights in a GGUF
session         what export.py does with its command line
"""

import paths  # noqa: F401  makes recipes/ importable
