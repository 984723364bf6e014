"""A plain server's `/metrics`: what is on it, what isn't, and what happened between two looks."""

import math
from pathlib import Path

import msgspec
import pytest

from schedtop.control.vllm.scrape import NotAnEngine, Reading, is_plain_server, page_address, read
from schedtop.control.vllm.windows import History, grown_buckets, percentile
from schedtop.tui.cells import plain
from schedtop.tui.scraped import as_json, estimate_text, missing, picture

PAGE = (Path(__file__).parent / "scraped-vllm-page.txt").read_text()
SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0"} 5.0
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="1"} 5.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0"} 2.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="m",tp_rank="0"} 0.28
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 1000.0
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_bucket{le="0.1",model_name="m"} 1.0
sglang:time_to_first_token_seconds_bucket{le="0.5",model_name="m"} 3.0
sglang:time_to_first_token_seconds_bucket{le="+Inf",model_name="m"} 4.0
sglang:time_to_first_token_seconds_count{model_name="m"} 4.0
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.0
"""


def reading(**changes) -> Reading:
    return msgspec.structs.replace(read(PAGE)[0], **changes)


def test_vllms_page_gives_its_numbers() -> None:
    (engine,) = read(PAGE)
    assert (engine.kind, engine.engine, engine.model) == ("vllm", "0", "tiny")
    assert (engine.num_running, engine.num_waiting) == (12, 14)
    assert engine.waiting_by_reason == {"capacity": 14, "deferred": 0}
    assert engine.kv_usage == pytest.approx(0.972972972972973)
    assert (engine.num_blocks, engine.block_size) == (260, 32)
    assert engine.counters["preemptions"] == 18
    assert engine.counters["generated_tokens"] == 12519
    assert engine.finished is not None and engine.finished["length"] == 115
    assert engine.histograms["ttft"] is not None and engine.histograms["ttft"][-1] == (math.inf, 129)


def test_what_a_page_lacks_is_none_and_never_zero() -> None:
    (engine,) = read(PAGE)
    assert engine.counters["draft_tokens"] is None
    assert missing(engine) == ["draft tokens", "draft tokens accepted"]
    document = msgspec.json.decode(as_json("http://host", [engine]))
    assert document["engines"][0]["counters"]["draft_tokens"] is None


def test_a_page_without_a_histogram_says_so_on_screen() -> None:
    page = "\n".join(
        line for line in PAGE.splitlines() if "request_queue_time" not in line and "kv_cache_usage" not in line
    )
    (engine,) = read(page)
    assert engine.histograms["queue"] is None and engine.kv_usage is None
    history = History()
    history.add(0.0, engine)
    lines = [plain(line) for line in picture("http://host", {"0": history}, "", 100)]
    assert any(line.startswith("queue time") and "not exported by this engine" in line for line in lines)
    assert any(line.startswith("KV pool –") for line in lines)


def test_sglangs_names_are_read_and_its_ranks_counted_once() -> None:
    (engine,) = read(SGLANG)
    assert (engine.kind, engine.num_running, engine.num_waiting, engine.kv_usage) == ("sglang", 5, 2, 0.28)
    assert engine.counters["generated_tokens"] == 1000
    assert engine.counters["preemptions"] is None
    assert engine.histograms["ttft"] == ((0.1, 1), (0.5, 3), (math.inf, 4))
    assert engine.histograms["itl"] is None


def test_engines_of_one_address_are_told_apart_and_sorted_by_number() -> None:
    pages = [PAGE.replace('engine="0"', f'engine="{rank}"') for rank in (10, 2)]
    engines = read("\n".join(pages))
    assert [engine.engine for engine in engines] == ["2", "10"]
    assert [engine.num_running for engine in engines] == [12, 12]


def test_the_blocks_that_vllm_tells_for_all_its_engines_together_are_shared_out() -> None:
    pages = [PAGE.replace('engine="0"', f'engine="{rank}"').replace('"260"', '"520"') for rank in (0, 1)]
    assert [engine.num_blocks for engine in read("\n".join(pages))] == [260, 260]


@pytest.mark.parametrize("page", ["", "# HELP x y\nx 1\n", "<html>not found</html>", '{"detail": "Not Found"}'])
def test_a_page_of_something_else_is_refused_in_words(page: str) -> None:
    with pytest.raises(NotAnEngine, match="/metrics"):
        read(page)


def test_our_gateways_page_is_not_taken_for_a_plain_server() -> None:
    assert is_plain_server(PAGE)
    assert is_plain_server(SGLANG)
    assert not is_plain_server(PAGE + "schedtop_step 4\n")
    assert not is_plain_server("up 1\n")


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/metrics"])
def test_every_way_to_write_the_address_finds_the_page(url: str) -> None:
    assert page_address(url) == "http://h:1/metrics"


def test_a_percentile_lies_in_the_bucket_it_names() -> None:
    buckets = ((0.1, 50.0), (0.25, 90.0), (math.inf, 100.0))
    p50, p90, p99 = (percentile(buckets, share) for share in (0.5, 0.9, 0.99))
    assert p50 is not None and (p50.low, p50.high) == (0.0, 0.1)
    assert p90 is not None and (p90.low, p90.high, p90.value) == (0.1, 0.25, pytest.approx(0.25))
    assert p99 is not None and (p99.low, p99.high) == (0.25, None)
    assert estimate_text(p99) == "over 250 ms"
    assert percentile(((0.1, 0.0), (math.inf, 0.0)), 0.5) is None


def test_percentiles_are_of_the_window_and_not_of_all_time() -> None:
    history = History()
    history.add(0.0, reading(histograms={"ttft": ((0.1, 1000.0), (1.0, 1000.0), (math.inf, 1000.0))}))
    history.add(5.0, reading(histograms={"ttft": ((0.1, 1000.0), (1.0, 1004.0), (math.inf, 1004.0))}))
    spread = history.spread("ttft")
    assert spread is not None
    assert (spread.count, spread.p50.low, spread.p50.high) == (4, 0.1, 1.0)


def test_what_left_the_window_no_longer_counts() -> None:
    history = History()
    for mono, total in ((0.0, 0.0), (1.0, 500.0), (30.0, 500.0), (35.0, 500.0)):
        history.add(mono, reading(counters={"generated_tokens": total}))
    assert history.rate("generated_tokens", 10.0) == 0
    assert history.increase("generated_tokens", 60.0) == 500


def test_a_counter_that_falls_began_anew_and_loses_nothing() -> None:
    history = History()
    for mono, total in ((0.0, 100.0), (1.0, 150.0), (2.0, 30.0), (3.0, 40.0)):
        history.add(mono, reading(counters={"generated_tokens": total}, histograms={}))
    assert history.increase("generated_tokens") == 50 + 30 + 10
    assert history.num_restarts == 1


def test_a_histogram_that_began_anew_counts_what_it_shows() -> None:
    before, after = ((0.1, 90.0), (math.inf, 100.0)), ((0.1, 3.0), (math.inf, 4.0))
    assert grown_buckets(before, after) == after
    assert grown_buckets(before, ((0.1, 91.0), (math.inf, 102.0))) == ((0.1, 1.0), (math.inf, 2.0))


def test_a_rate_needs_two_looks() -> None:
    history = History()
    history.add(0.0, reading())
    assert history.rate("generated_tokens") is None
    assert history.spread("ttft") is None
    assert history.rate("draft_tokens") is None
