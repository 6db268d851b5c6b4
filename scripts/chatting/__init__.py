# SPDX-License-Identifier: Apache-2.0
"""Conversations with trained models: the library of chat.py.

conversation  what was said, and a conversation as a row to train on
speakers      the models that answer; adapters of one base share it
terminal      the conversation in the terminal
page          the conversation on a page in a browser, which no other machine reaches
"""
