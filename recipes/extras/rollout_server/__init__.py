# SPDX-License-Identifier: Apache-2.0
"""--rollout_server: a server answers the prompts that a model is trained on by rewards."""
