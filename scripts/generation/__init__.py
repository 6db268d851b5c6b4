# SPDX-License-Identifier: Apache-2.0
"""Text from trained models: the library of generate, chat, evaluate, merge and export."""
