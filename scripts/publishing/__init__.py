# SPDX-License-Identifier: Apache-2.0
"""The parts of push.py: which files of a folder are pushed and why it is refused; its card."""
