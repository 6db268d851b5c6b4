# SPDX-License-Identifier: Apache-2.0
"""--use_transformers_continuous_batching: prompts are answered by transformers' generate_batch."""
