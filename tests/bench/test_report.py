"""Figures that all benchmarks compute alike."""

from __future__ import annotations

import pytest

from bench._vllm.figures import figures
from bench.report import about, quantile


@pytest.mark.parametrize(
    ("count", "level", "found"),
    [
        (1, 0.99, 1),
        (2, 0.5, 1),
        (3, 0.5, 2),
        (100, 0.99, 99),  # not the largest
        (100, 0.07, 7),  # 0.07 * 100 is a little more than 7
        (101, 0.99, 100),
        (10, 0.0, 1),
        (10, 1.0, 10),
    ],
)
def test_a_quantile_is_the_smallest_value_that_the_share_does_not_exceed(count, level, found):
    assert quantile(range(1, count + 1), level) == found


def test_the_99th_percentile_of_a_hundred_requests_is_not_the_slowest():
    found = figures([float(number) for number in range(1, 101)])

    assert (found["p50"], found["p99"], found["worst"]) == (50.0, 99.0, 100.0)


def test_a_result_names_its_command_without_paths_of_this_machine():
    given = ["--turns", "4", "--vllm", "/home/a/python", "--cache=/home/b", "--json", "c.json", "--resume"]

    assert about("engine", given)["command"] == "laps-sd bench engine --turns 4 --vllm PYTHON --cache=DIR"
