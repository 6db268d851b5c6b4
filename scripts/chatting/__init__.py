# SPDX-License-Identifier: Apache-2.0
"""Conversations with trained models: the library of chat.py."""
