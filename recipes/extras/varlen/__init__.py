# SPDX-License-Identifier: Apache-2.0
"""--attn_implementation varlen: FlashAttention without a package."""
