# SPDX-License-Identifier: Apache-2.0
"""Conversations with trained models: the library of chat.py.

history      what was said, and whose answers the conversation continues with
speakers     the models that answer; adapters of one base share it
rows         a conversation as a training row in a file
commands     the commands that begin with a slash
terminal     the conversation in the terminal
page         the conversation on a page in a browser
serving      the server of the page, which no other machine reaches
session      what chat.py does with its command line
"""

import paths  # noqa: F401  makes recipes/ importable
