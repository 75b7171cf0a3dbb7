from __future__ import annotations

import json

import pytest

from service.engine.jobs import BatchTimes
from service.metrics import STAGES, Timings


def test_queries_of_one_batch_count_its_time_once() -> None:
    shared, other = BatchTimes(0.010, 0.002), BatchTimes(0.010, 0.002)
    timings = Timings()
    timings.add_engine(0.030, [shared, shared, other])
    assert timings.encode == pytest.approx(0.020)
    assert timings.search == pytest.approx(0.004)
    assert timings.queue == pytest.approx(0.006)


@pytest.mark.parametrize(("waited", "expected"), [(0.001, (0.0, 0.0, 0.001)), (0.005, (0.0, 0.003, 0.002))])
def test_a_query_that_joined_a_running_batch_counts_only_the_time_it_waited(
    waited: float, expected: tuple[float, float, float]
) -> None:
    timings = Timings()
    timings.add_engine(waited, [BatchTimes(0.010, 0.002)])
    assert (timings.queue, timings.encode, timings.search) == pytest.approx(expected)


def test_header_and_json_are_the_same_milliseconds() -> None:
    timings = Timings(0.00005, 0.0001, 0.0019, 0.0004, 0.00003, 0.0026)
    written = json.loads(timings.as_json())
    assert list(written) == list(STAGES)
    assert written["encode"] == 1.9
    header = dict(part.split(";dur=") for part in timings.as_server_timing().decode().split(", "))
    assert {stage: float(ms) for stage, ms in header.items()} == written
