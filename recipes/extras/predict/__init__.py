# SPDX-License-Identifier: Apache-2.0
"""--predict_with_generate: answers that a language model generates while it is trained."""
