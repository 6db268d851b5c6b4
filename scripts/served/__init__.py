# SPDX-License-Identifier: Apache-2.0
"""A running server is held against a trained folder: the library of check_server.py.

client     questions over HTTP, in OpenAI's form, which vLLM, `transformers serve`, llama-server
           and Ollama understand
comparing  how the answers of a server differ from those of the trained model, and whether they may
session    what check_server.py does with its command line
"""

import paths  # noqa: F401  makes recipes/ importable
