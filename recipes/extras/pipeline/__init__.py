# SPDX-License-Identifier: Apache-2.0
"""Pipeline parallelism: each rank has some of the layers (recipes/llama_pipeline.py)."""
