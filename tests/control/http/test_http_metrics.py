"""`/metrics`: vLLM's names wherever we have the thing, and numbers that stay true."""

import asyncio
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from schedtop.control.http.histogram import Histogram, one_two_five

VLLM_PAGE = Path(__file__).parent / "vllm-0.32-metrics.txt"
NOT_OURS = {
    "vllm:estimated_flops_per_gpu_total": "0 in vLLM too unless it is asked for; the screen shows our own arithmetic",
    "vllm:estimated_read_bytes_per_gpu_total": "as above",
    "vllm:estimated_write_bytes_per_gpu_total": "as above",
    "vllm:mm_cache_queries_total": "no images are taken over HTTP, so there is no cache of them",
    "vllm:mm_cache_hits_total": "as above",
}
"""Of vLLM's page, what isn't exported, and why; docs/http.md says the same."""
LABELS = '{engine="0",model_name="fake"}'


def families(page: str) -> dict:
    found = {family.name: family for family in text_string_to_metric_families(page) if family.samples}
    return {name: family for name, family in found.items() if not name.endswith("_created")}


async def page(world) -> str:
    async with world.session.get("/metrics") as response:
        assert response.content_type == "text/plain"
        return await response.text()


class Described(NamedTuple):
    """One metric of a page: label names, and the values in order of those labels that have several."""

    kind: str
    labels: frozenset[str]
    values: dict[str, list[str]]


def theirs() -> dict[str, Described]:
    lines = [line.split() for line in VLLM_PAGE.read_text().splitlines() if not line.startswith("#")]
    return {
        name: Described(kind, frozenset(labels.split(",")) - {"-"}, {
            label: text.split("|") for label, text in (value.split("=", 1) for value in values)
        })
        for kind, name, labels, *values in lines
    }  # fmt: skip


def described(text: str) -> dict[str, Described]:
    """The same of a page as it is sent."""
    found: dict[str, Described] = {}
    kinds = dict(line.split()[2:] for line in text.splitlines() if line.startswith("# TYPE"))
    for line in text.splitlines():
        match = re.match(r"([^#{ ]+)(?:\{(.*)\})? \S+$", line)
        if match is None:
            continue
        name = match[1] if match[1] in kinds else re.sub(r"_(bucket|sum|count)$", "", match[1])
        labels = dict(re.findall(r'(\w+)="([^"]*)"', match[2] or ""))
        before = found.get(name, Described(kinds[name], frozenset(), {}))
        for label, value in labels.items():
            if value not in before.values.setdefault(label, []):
                before.values[label].append(value)
        found[name] = before._replace(labels=before.labels | labels.keys())
    return found


async def test_vllms_metrics_have_vllms_names_types_labels_and_buckets(start_world) -> None:
    world = await start_world(max_model_len=2048)
    await world.complete("hello", max_tokens=3)
    text = await page(world)
    ours, wanted = described(text), theirs()
    assert len(wanted) == 44
    assert {name for name in wanted if name not in ours} == NOT_OURS.keys()
    for name in wanted.keys() - NOT_OURS.keys() - {"vllm:cache_config_info"}:
        assert ours[name].kind == wanted[name].kind, name
        assert ours[name].labels == wanted[name].labels, name
        for label, values in wanted[name].values.items():
            if label in ("le", "source", "reason", "sleep_state"):
                assert ours[name].values[label] == values, (name, label)
            else:
                assert set(values) <= set(ours[name].values[label]), (name, label)
        base = re.sub(r"_total$", "", name) if ours[name].kind == "counter" else name
        assert ours[name].kind == "gauge" or f"{base}_created" in ours, name


async def test_what_isnt_exported_of_vllms_page_is_said_in_the_documentation() -> None:
    text = (Path(__file__).parents[3] / "docs" / "http.md").read_text()
    assert [name for name in NOT_OURS if f"`{name}`" not in text] == []


async def test_drafts_are_counted_under_vllms_names_where_drafts_can_be_made(start_world) -> None:
    world = await start_world(max_num_speculative_tokens=2, knobs={"num_speculative_tokens": 2})
    world.core.scheduler.stats.count_drafts(2, 1)
    world.core.scheduler.stats.count_drafts(2, 2)
    metrics = await world.metrics()
    for name, value in (("drafts", 2), ("draft_tokens", 4), ("accepted_tokens", 3)):
        assert metrics[f"vllm:spec_decode_num_{name}_total{LABELS}"] == value
    per_place = {name: value for name, value in metrics.items() if "accepted_tokens_per_pos_total" in name}
    assert list(per_place.values()) == [2, 1]
    assert [re.search(r'position="(\d)"', name)[1] for name in per_place] == ["0", "1"]


async def test_without_room_for_drafts_nothing_is_told_of_them(world) -> None:
    assert "spec_decode" not in await page(world)


async def test_what_a_request_asked_for_counts_once_per_prompt_and_what_it_got_once_per_answer(world) -> None:
    await world.complete("hello", n=3, max_tokens=4)
    await world.complete(["a" * 40, "b"], max_tokens=2)
    metrics = await world.metrics()
    counted = {name: metrics[f"vllm:request_{name}_count{LABELS}"] for name in ("params_n", "generation_tokens")}
    assert counted == {"params_n": 3, "generation_tokens": 5}
    assert metrics[f"vllm:request_params_n_sum{LABELS}"] == 5
    assert metrics[f"vllm:request_max_num_generation_tokens_sum{LABELS}"] == 4 + 2 + 2
    assert metrics[f"vllm:request_prefill_kv_computed_tokens_sum{LABELS}"] == 3 * 5 + 41


async def test_cached_prompt_tokens_are_told_by_where_they_lay(world) -> None:
    for _ in range(2):
        await world.complete("x" * 33, max_tokens=1)
    metrics = await world.metrics()
    of_source = 'source="{}"}}'.format
    cached = {name.rpartition(",")[2]: value for name, value in metrics.items() if "cached_by_source_total" in name}
    assert (
        cached[of_source("device")] == sum(cached.values()) == metrics[f"vllm:prompt_tokens_cached_total{LABELS}"] == 32
    )
    computed = [v for name, v in metrics.items() if "prompt_tokens_by_source_total" in name and "local_compute" in name]
    assert computed == [66 - 32]


async def test_cache_config_has_the_sizes_that_dashboards_read(world) -> None:
    (sample,) = families(await page(world))["vllm:cache_config_info"].samples
    assert (sample.labels["block_size"], sample.labels["num_gpu_blocks"]) == ("16", "999")


async def test_ten_at_once_with_room_for_one_are_one_running_and_nine_waiting(start_world) -> None:
    world = await start_world(step_s=0.003, max_num_seqs=1)
    with world.slow_motion():
        tasks = [asyncio.create_task(world.complete("x" * 16, max_tokens=200)) for _ in range(10)]
        await world.until(lambda s: s.num_running == 1 and s.num_waiting == 9)
        metrics = await world.metrics()
    assert metrics[f"vllm:num_requests_running{LABELS}"] == 1
    assert metrics[f"vllm:num_requests_waiting{LABELS}"] == 9
    reasons = [value for name, value in metrics.items() if name.startswith("vllm:num_requests_waiting_by_reason")]
    assert sum(reasons) == 9
    await leave(tasks)


async def test_everything_aborted_at_once_shows_as_nothing_without_any_traffic(start_world) -> None:
    world = await start_world(step_s=0.003)
    with world.slow_motion():
        tasks = [asyncio.create_task(world.complete("x" * 16, max_tokens=200)) for _ in range(50)]
        await world.until(lambda s: s.num_running + s.num_waiting == 50)
        await leave(tasks)
    await world.until(lambda s: s.num_running + s.num_waiting == 0)
    metrics = await world.metrics()
    assert metrics[f"vllm:num_requests_running{LABELS}"] == 0
    assert metrics[f"vllm:num_requests_waiting{LABELS}"] == 0
    assert metrics[f"vllm:kv_cache_usage_perc{LABELS}"] == 0
    assert metrics["schedtop_snapshot_age_seconds"] >= 0


async def leave(tasks: list[asyncio.Task]) -> None:
    """All these clients go away."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _balance(metrics: dict[str, float]) -> tuple[float, float]:
    ended = sum(value for name, value in metrics.items() if name.startswith("vllm:request_success_total"))
    live = metrics[f"vllm:num_requests_running{LABELS}"] + metrics[f"vllm:num_requests_waiting{LABELS}"]
    return metrics[f"schedtop_requests_added_total{LABELS}"], ended + live


async def test_requests_added_are_those_ended_and_those_alive_at_every_scrape(start_world) -> None:
    world = await start_world(step_s=0.003, max_num_seqs=4, knobs={"max_num_queued_reqs": 6})
    with world.slow_motion():
        tasks = [asyncio.create_task(world.complete("x" * 16, max_tokens=40)) for _ in range(12)]
        await world.until(lambda s: s.counters.added + s.counters.refused == 12)
        await leave(tasks[:5])
    while not all(task.done() for task in tasks):
        added, accounted = _balance(await world.metrics())
        assert added == accounted
    await world.until(lambda s: s.num_running + s.num_waiting == 0)
    metrics = await world.metrics()
    assert len(set(_balance(metrics))) == 1
    assert (
        metrics[f"schedtop_requests_refused_total{LABELS}"]
        == 12 - metrics[f"schedtop_requests_added_total{LABELS}"]
        > 0
    )


async def test_the_equation_holds_at_every_scrape_through_cuts_in_every_state(start_world) -> None:
    """5 end by themselves, 5 are cut after their first token, 5 while queued, 2 are refused."""
    world = await start_world(step_s=0.003, max_num_seqs=10)
    is_over = asyncio.Event()

    async def scrape() -> int:
        count = 0
        while not is_over.is_set():
            added, accounted = _balance(await world.metrics())
            assert added == accounted
            count += 1
        return count

    scraping = asyncio.create_task(scrape())
    with world.slow_motion():
        normal = [asyncio.create_task(world.complete("x" * 16, max_tokens=60)) for _ in range(5)]
        body = {"prompt": "y" * 16, "max_tokens": 200, "stream": True}
        streams = [await world.post("/v1/completions", body) for _ in range(5)]
        await world.until(lambda s: s.num_running == 10 and s.counters.first_tokens == 10)
        await world.send("PATCH", "/control/v1/knobs", {"changes": {"max_num_queued_reqs": 5}})
        queued = [asyncio.create_task(world.complete("z" * 16, max_tokens=60)) for _ in range(5)]
        await world.until(lambda s: s.num_waiting == 5)
        assert [status for status, _ in [await world.complete("w") for _ in range(2)]] == [429, 429]
        await leave(queued)
        for stream in streams:
            stream.close()
    assert {status for status, _ in await asyncio.gather(*normal)} == {200}
    await world.until(lambda s: s.num_running + s.num_waiting == 0)
    is_over.set()
    assert await scraping > 0
    metrics = await world.metrics()
    assert _balance(metrics) == (15, 15)
    assert metrics[f"schedtop_requests_refused_total{LABELS}"] == 2
    ended = {name: value for name, value in metrics.items() if "request_success_total" in name and value}
    assert sorted(ended.values()) == [5, 10]


async def test_first_tokens_are_counted_once_each_through_preemptions_aborts_and_several_answers(start_world) -> None:
    """20 requests, three of them for two answers; 6 are preempted after their first token, 4 cut after it."""
    world = await start_world(step_s=0.003)
    body = {"prompt": "x" * 16, "max_tokens": 200, "stream": True}
    with world.slow_motion():
        streams = [
            await world.post("/v1/completions", {**body, "request_id": f"r{index}", "n": 2 if index < 3 else 1})
            for index in range(20)
        ]
        await world.until(lambda s: s.counters.first_tokens == 23)
        ids = [f"cmpl-r{index}" for index in range(10, 16)]
        _, ack = await world.send("POST", "/control/v1/requests/preempt", {"select": {"ids": ids}})
        assert sorted(ack["touched"]["changed"]) == ids
        for stream in streams[16:]:
            stream.close()
    await asyncio.gather(*(stream.read() for stream in streams[:16]))
    await world.until(lambda s: s.num_running + s.num_waiting == 0)
    await _steps_seen(world)
    metrics = await world.metrics()
    assert metrics[f"vllm:num_preemptions_total{LABELS}"] == 6
    for name in ("vllm:time_to_first_token_seconds_count", "schedtop_first_tokens_total"):
        assert metrics[f"{name}{LABELS}"] == 23, name
    assert metrics[f"vllm:e2e_request_latency_seconds_count{LABELS}"] == 19
    gaps = metrics[f"vllm:inter_token_latency_seconds_count{LABELS}"]
    assert gaps == metrics[f"vllm:generation_tokens_total{LABELS}"] - 23


async def test_each_sequence_gives_one_first_token_sample_whatever_happens_to_it(start_world) -> None:
    world = await start_world(num_kv_blocks=13, max_num_batched_tokens=64)
    bodies = [{"prompt": chr(97 + index) * 32, "max_tokens": 20} for index in range(6)]
    answers = await asyncio.gather(*(world.complete(**body) for body in bodies), world.complete("z" * 16, n=3))
    assert all(status == 200 for status, _ in answers)
    await _steps_seen(world)
    metrics = await world.metrics()
    assert metrics[f"vllm:num_preemptions_total{LABELS}"] > 0
    assert metrics[f"vllm:time_to_first_token_seconds_count{LABELS}"] == 9
    assert metrics[f"schedtop_first_tokens_total{LABELS}"] == 9
    gaps = metrics[f"vllm:inter_token_latency_seconds_count{LABELS}"]
    assert gaps == metrics[f"vllm:generation_tokens_total{LABELS}"] - 9
    assert metrics[f"vllm:e2e_request_latency_seconds_count{LABELS}"] == 9
    assert metrics[f"vllm:request_generation_tokens_count{LABELS}"] == 9
    assert metrics["schedtop_step_records_missed_total"] == 0


async def _steps_seen(world) -> None:
    """Until the subscription has brought all steps."""
    last = (await world.snapshot()).last_step.step
    seen = asyncio.Event()
    world.gateway.link.on_update.append(lambda update: seen.set())
    while (world.gateway.metrics.samples._last_step or 0) < last:
        await seen.wait()
        seen.clear()


async def test_no_series_comes_from_what_clients_send(world) -> None:
    for path in ("/no/path", "/v1/models", "/metrics"):
        await world.session.get(path)
    for fields in ({"max_tokens": 1}, {"model": "m"}):
        await world.complete("hello", **fields)
    await _steps_seen(world)
    before = _series(await page(world))
    fields = [{"request_id": f"id-{index}", "priority": index, "user": f"user-{index % 200}"} for index in range(500)]
    fields += [{"stop": [f"x{index}"], "cache_salt": f"salt{index}", "model": f"m{index}"} for index in range(50)]
    await asyncio.gather(*(world.complete("hello", max_tokens=1, **extra) for extra in fields))
    for index in range(20):
        async with world.session.request(("PUT", "DELETE")[index % 2], f"/no/such/path{index}") as response:
            assert response.status == 404
    assert _series(await page(world)) == before


def _series(text: str) -> set[str]:
    return {re.sub(r" \S+$", "", line) for line in text.splitlines() if not line.startswith("#")}


async def test_openmetrics_is_spoken_to_those_who_ask_for_it(world) -> None:
    headers = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with world.session.get("/metrics", headers=headers) as response:
        assert response.content_type == "application/openmetrics-text"
        assert (await response.text()).endswith("# EOF\n")


async def test_without_an_engine_the_page_says_so_and_shows_no_old_numbers(world) -> None:
    await world.complete("hello", max_tokens=1)
    world.served.stop()
    await world.gateway.link.was_lost.wait()
    metrics = await world.metrics()
    assert metrics["schedtop_engine_up"] == 0
    assert not any(name.startswith("vllm:") for name in metrics)


async def test_rejections_are_counted_by_the_limit_that_caused_them(start_world) -> None:
    world = await start_world(step_s=0.003, max_num_seqs=1, knobs={"max_num_queued_reqs": 1})
    tasks = []
    with world.slow_motion():
        for num_waiting in range(2):
            tasks.append(asyncio.create_task(world.complete("x", max_tokens=200)))
            await world.until(lambda s, expected=num_waiting: (s.num_running, s.num_waiting) == (1, expected))
        status, _ = await world.complete("max_num_queued_tokens", request_id="max_num_queued_tokens")
    metrics = await world.metrics()
    assert status == 429
    assert metrics['vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_reqs"}'] == 1
    assert metrics['vllm:admission_rejections_total{model_name="fake",reason="max_num_queued_tokens"}'] == 0
    await leave(tasks)


def test_a_sample_equal_to_a_bound_counts_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(1.0)
    histogram.observe(2.0, 3)
    histogram.observe(2.1)
    assert (histogram.counts, histogram.total, histogram.num_samples) == ([1, 3, 1], 9.1, 5)


@pytest.mark.parametrize(("limit", "last"), [(2048, 2000.0), (4096, 2000.0), (5000, 5000.0), (1, 1.0), (None, 1e6)])
def test_token_count_bounds_end_at_the_models_length(limit, last) -> None:
    assert one_two_five(limit)[-1] == last


async def test_http_requests_are_counted_by_route_and_status_class(world) -> None:
    await world.complete("hello", max_tokens=1)
    await world.complete("hello", max_tokens=0)
    metrics = await world.metrics()
    for status in ("2xx", "4xx"):
        assert metrics[f'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}}'] == 1


async def test_a_metric_that_breaks_never_ends_serving(world, caplog) -> None:
    def breaks(*args) -> None:
        raise ValueError("counters only go up")

    world.gateway.link.on_update.append(breaks)
    world.gateway.service.on_answered.append(breaks)
    assert (await world.complete("hello", max_tokens=3))[0] == 200
    await _steps_seen(world)
    assert world.gateway.link.is_connected
    assert "counters only go up" in caplog.text


@pytest.mark.parametrize("name", ["prometheus-alerts.yml", "grafana-dashboard.json"])
async def test_alerts_and_dashboard_name_only_metrics_that_exist(world, name) -> None:
    await world.complete("hello", max_tokens=3)
    shown = {re.split(r"[{ ]", line)[0] for line in (await page(world)).splitlines() if not line.startswith("#")}
    text = (Path(__file__).parents[3] / "docs" / name).read_text()
    named = set(re.findall(r"\b(?:vllm:|schedtop_)[a-z0-9_]+", text))
    assert named and named <= shown
