# SPDX-License-Identifier: Apache-2.0
"""Text from trained models: the library of generate.py, chat.py, evaluate.py, merge.py, export.py.

loading      a trained folder: the model, or adapters on their base; what its run has recorded
answering    answers to conversations, also while they are shown
rows         rows of a file as questions with a reference, and exact match
session      what generate.py does, with serving: a server held against a trained folder
comparing    a folder as it was trained, and how far another form of it is from that
merging      what merge.py does
exporting    what export.py does, with ollama: a chat template in Ollama's language
"""
