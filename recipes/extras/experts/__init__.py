# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: each rank of a group has some of the experts of each layer, whole."""
