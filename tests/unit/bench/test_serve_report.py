from __future__ import annotations

from dataclasses import replace

from mooncake_v0.bench.client import Answer
from mooncake_v0.bench.serve_report import Percentiles, SweepPoint, percentiles, sweep_point

FAILED = Answer(0.0, 1.0, error="status 503: busy")


def make_answer(ttft_s: float, gap_s: float = 0.01, text: str = "x") -> Answer:
    return Answer(0.0, ttft_s + 3 * gap_s, ttft_s, (gap_s,) * 3, 4, text)


def make_point(proxy: list[Answer], plain: list[Answer]) -> SweepPoint:
    return sweep_point(128, 4, None, proxy=proxy, plain=plain, proxy_wall_s=2.0, plain_wall_s=1.0)


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([float(n) for n in range(1, 101)]) == Percentiles(50.5, 50.0, 90.0, 99.0)


def test_percentiles_of_nothing_are_zero() -> None:
    assert percentiles([]) == Percentiles(0.0, 0.0, 0.0, 0.0)


def test_the_ttft_ratio_is_the_median_over_the_same_prompts() -> None:
    point = make_point(
        [make_answer(0.2), make_answer(0.6), make_answer(3.0)], [make_answer(0.1)] * 2 + [make_answer(1)]
    )

    assert point.ratio.ttft == 3.0  # of 2, 6 and 3


def test_tpot_divides_by_the_tokens_after_the_first() -> None:
    point = make_point([make_answer(0.1, 0.02)], [make_answer(0.1, 0.01)])

    assert (point.proxy.tpot_ms.p50, point.ratio.tpot, point.ratio.itl_p99) == (20.0, 2.0, 2.0)


def test_throughput_counts_tokens_over_the_wall_time() -> None:
    point = make_point([make_answer(0.1)], [make_answer(0.1)])

    assert (point.proxy.tokens_per_s, point.plain.tokens_per_s, point.ratio.tokens_per_s) == (2.0, 4.0, 0.5)


def test_a_failed_request_is_counted_and_left_out_of_the_figures() -> None:
    point = make_point([FAILED, make_answer(0.2)], [make_answer(9.0), make_answer(0.1)])

    assert (point.proxy.requests, point.proxy.failed, point.proxy.first_error) == (2, 1, "status 503: busy")
    assert (point.ratio.ttft, point.compared_answers) == (2.0, 1)


def test_answers_that_differ_are_counted() -> None:
    point = make_point([make_answer(0.1, text="a"), make_answer(0.1)], [make_answer(0.1, text="b"), make_answer(0.1)])

    assert (point.equal_answers, point.compared_answers) == (1, 2)


def test_swapped_pieces_of_a_stream_are_no_other_answer() -> None:
    point = make_point([make_answer(0.1, text="ci te")], [make_answer(0.1, text="te ci")])

    assert (point.equal_answers, point.compared_answers) == (1, 1)


def test_an_answer_that_lost_tokens_is_timed_and_not_compared() -> None:
    point = make_point([replace(make_answer(0.2), lost_tokens=2)], [make_answer(0.1)])

    assert (point.proxy.incomplete, point.proxy.failed, point.compared_answers, point.ratio.ttft) == (1, 0, 0, 2.0)


def test_a_side_without_answers_has_no_ratios() -> None:
    point = make_point([FAILED], [FAILED])

    assert (point.ratio.ttft, point.ratio.tokens_per_s, point.proxy.tokens_per_s) == (None, None, 0.0)
