# SPDX-License-Identifier: Apache-2.0
"""A tiny Mixtral: the maker of Llamas, with the options of a Mixtral."""

from tiny.llama import make

__all__ = ["make"]
