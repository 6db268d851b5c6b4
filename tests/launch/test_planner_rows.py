# SPDX-License-Identifier: Apache-2.0
"""Each peak that was measured on CPU ranks is planned, within the bound of its engine."""

from transformers import AutoConfig

import planner_jobs
from planner.engines import Profiles


def test_every_measured_peak_is_planned(tmp_path):
    AutoConfig.for_model("llama", **planner_jobs.MODEL).save_pretrained(tmp_path)
    profiles = Profiles()  # which jobs and engines share
    measured = planner_jobs.tracked_rows()
    rows = [planner_jobs.compare(row, tmp_path, profiles) for row in measured]
    assert len(rows) > 200
    far = [row for row in rows if abs(row["error"]) > planner_jobs.bound_of(row)]
    assert not far
