# SPDX-License-Identifier: Apache-2.0
"""Adapters become part of their base, tensor by tensor: the library of merge.py.

adapter      a folder with adapters: its files, and what of peft's options is not merged
skeleton     the base and its adapters without weights: what peft would change, and where
plan         which tensors of the base's files change, and which are tied
deltas       the arithmetic for one tensor
quantized    the values that a quantized base computes with
shards       reading and writing safetensors, shard by shard
disk         what happens where a file cannot be written
writing      the merged folder, in a staging folder until it is complete
prompts      held-out prompts, and where they come from
contestants  what a model says to the prompts: text, tokens, logits
comparing    how contestants differ, and whether they may
receipt      all comparisons, sizes and hashes, and their table
card         the model card: that of the run, with what the merge adds
checking     what is wrong with a folder before a model is loaded from it
tensors      whether the written tensors are what peft makes of the base and the adapters
trained      the model that was trained, and the same with its adapters merged by peft
session      what merge.py does with its command line

A receipt knows only contestants, so that an export to another format can have one too.
"""

import paths  # noqa: F401  makes recipes/ importable
