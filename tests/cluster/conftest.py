# SPDX-License-Identifier: Apache-2.0
"""One Slurm cluster for all tests of this folder."""

import pytest

import slurm_cluster


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """Two running nodes; a test is skipped, with the reason, where there can be none."""
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    # Above the folders of pytest, which only their owner may enter
    cluster = slurm_cluster.Cluster(tmp_path_factory.mktemp("slurm") / "cluster")
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
