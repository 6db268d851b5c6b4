# SPDX-License-Identifier: Apache-2.0
"""--load_in_fp8: a frozen base in float8, whose products are in float8 too."""
