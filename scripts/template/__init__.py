# SPDX-License-Identifier: Apache-2.0
"""A recipe as a template: the library of copy_recipe.py.

imports    the files that a recipe reaches, read from its source
copying    the files of a copy
copy_test  the copy's own test
updating   what has changed since then, merged into a copy
"""
