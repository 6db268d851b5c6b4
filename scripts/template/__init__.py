# SPDX-License-Identifier: Apache-2.0
"""A recipe as a template: the library of copy_recipe.py.

imports    the files that a recipe reaches, read from its source
names      the names of files in a copied text
origin     the commit of this repository, and the text of ORIGIN.md
copying    the folder that is written
"""
