"""Drives vLLM's own scheduler through a trace, without engine or model, and records what it decides.

Run with a Python that has vLLM 0.32. Trace format and engine loop: README.md here. Making up traces isn't here
(`trace_kinds.py`), nor is making vLLM's scheduler (`control/vllm/scheduler_alone.py`, shared with the benchmark).
"""

import heapq
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "control" / "vllm"))

from scheduler_alone import DEFAULTS, EOS, Json, make_request, make_scheduler, prepare

prepare()  # before vLLM is imported: it reads the environment then

from vllm.v1.core.sched.interface import PauseState  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

UNKNOWN = -1
"""Stands for tokens that can only be sampled once the result of the step before is there."""


def token(seed: int, position: int) -> int:
    """The token at an absolute position."""
    return (((seed * 2654435761 + position * 40503 + 12345) & 0xFFFFFFFF) >> 7) % EOS


class Recording:
    """One run of one trace: the engine loop, the stand-in model, and the record of each iteration."""

    def __init__(self, trace: Json) -> None:
        self.trace = trace
        self.settings = {**DEFAULTS, **trace["config"]}
        self.sched = make_scheduler(self.settings)
        self.specs = {request["id"]: request for request in trace["requests"]}
        self.numbers = {request["id"]: number for number, request in enumerate(trace["requests"])}
        self.arrivals = deque(sorted(trace["requests"], key=lambda request: request["arrival"]))
        self.actions = deque(sorted(trace.get("actions", ()), key=lambda action: action["at"]))
        self.iteration = 0
        self.sequence = 0
        self.queue: deque[tuple[int, SchedulerOutput, list[list[int]]]] = deque()
        self.preempted: list[str] = []
        self.records: list[Json] = []
        self.state: Json = {"tok": [], "run": [], "wait": [], "free": None, "kvw": [], "def": []}
        self.tables: dict[str, int] = {}
        self._listen_to_preemptions()

    def _listen_to_preemptions(self) -> None:
        """vLLM reports preempted requests as a set; a trace lists them in order."""
        preempt = self.sched._preempt_request

        def noting(request: Request, *args: Any, **kwargs: Any) -> None:
            self.preempted.append(request.request_id)
            preempt(request, *args, **kwargs)

        self.sched._preempt_request = noting

    def run(self) -> Json:
        """The loop; returns what a trace file holds as `expect`."""
        depth = 2 if self.settings["async_scheduling"] else 1
        stalled, num_empty = False, 0
        while self.iteration < self.trace["max_iters"]:
            self._inputs()
            has_requests = self.sched.has_requests()
            if not has_requests and not self.queue:
                coming = [item["arrival"] for item in self.arrivals] + [item["at"] for item in self.actions]
                if not coming:
                    break
                self.iteration = min(coming)
                continue
            record: Json = {"i": self.iteration}
            num_tokens = self._schedule(record) if has_requests else None
            fills_up = num_tokens is not None and len(self.queue) < depth
            if self.queue and not (fills_up and (num_tokens or self.sched.has_requests())):
                self._update(record)
            self._close(record)
            self.iteration += 1
            if num_tokens is not None:
                num_empty = 0 if num_tokens else num_empty + 1
            if num_empty >= 4 and not self.arrivals and not self.actions:
                stalled = True
                break
        return {
            "records": self.records,
            "iters": self.iteration,
            "stalled": stalled,
            "unfinished": sorted(self.numbers[request_id] for request_id in self.sched.requests),
        }

    # ---- inputs ---------------------------------------------------------------------------------------------

    def _inputs(self) -> None:
        while self.arrivals and self.arrivals[0]["arrival"] <= self.iteration:
            self._add(self.arrivals.popleft())
        while self.actions and self.actions[0]["at"] <= self.iteration:
            self._act(self.actions.popleft())

    def _add(self, spec: Json) -> None:
        prompt = [token(seed, i) for seed, count in spec["prompt"] for i in range(count)]
        priority, arrival_time = spec.get("priority", 0), spec["arrival_time"]
        size = self.settings["block_size"]
        self.sched.add_request(make_request(spec["id"], prompt, spec["max_tokens"], size, arrival_time, priority))

    def _act(self, action: Json) -> None:
        sched, op = self.sched, action["op"]
        if op == "set":
            self._set_knob(action["knob"], action["value"])
        elif op == "pause":
            sched.set_pause_state(PauseState(action["value"]))
        elif (request := sched.requests.get(action["id"])) is None:
            return
        elif op == "abort":
            sched.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        elif op == "prio":
            request.priority = action["value"]
            if self.settings["policy"] == "priority":
                heapq.heapify(sched.waiting._heap)
        elif op == "max_tokens":
            request.max_tokens = action["value"]
        elif op == "preempt" and request.status == RequestStatus.RUNNING:
            sched.running.remove(request)
            sched._preempt_request(request, time.monotonic(), drop_stale_output=action["drop"])
            sched.prev_step_scheduled_req_ids.discard(request.request_id)

    def _set_knob(self, knob: str, value: Any) -> None:
        if knob == "watermark":
            self.sched.kv_cache_manager.watermark_blocks = int(value * self.settings["num_blocks"])
        elif knob == "long_prefill_token_threshold":
            self.sched.scheduler_config.long_prefill_token_threshold = value
        else:
            setattr(self.sched, knob, value)

    # ---- the stand-in model ---------------------------------------------------------------------------------

    def _sample(self, output: SchedulerOutput) -> list[list[int]]:
        return [self._sample_one(request_id, output) for request_id in output.num_scheduled_tokens]

    def _sample_one(self, request_id: str, output: SchedulerOutput) -> list[int]:
        request = self.sched.requests[request_id]
        if request.is_prefill_chunk:
            return []
        drafts = output.scheduled_spec_decode_tokens.get(request_id, [])
        if drafts and self.settings["async_scheduling"]:
            return [UNKNOWN]
        position = request.num_computed_tokens - len(drafts)
        sampled = []
        for draft in [*drafts, None]:
            sampled.append(self._token_at(request, position))
            if draft != sampled[-1]:
                break
            position += 1
        return sampled

    def _sample_late(self, request_id: str, output: SchedulerOutput) -> list[int]:
        """Async, the drafts that a step verifies are known when the result of the step before is taken."""
        request = self.sched.requests.get(request_id)
        if request is None:
            return []
        num_drafts, start = len(output.scheduled_spec_decode_tokens[request_id]), request.num_tokens
        right = (self.specs[request_id]["seed"] + start) % (self.settings["num_speculative_tokens"] + 1)
        was_running = request_id in output.scheduled_cached_reqs.req_ids
        was_running = was_running and request_id not in output.scheduled_cached_reqs.resumed_req_ids
        num_accepted = min(num_drafts, right) if was_running else 0
        return [self._token_at(request, start + j) for j in range(num_accepted + 1)]

    def _token_at(self, request: Request, position: int) -> int:
        spec = self.specs[request.request_id]
        stop_after = spec.get("stop_after")
        if stop_after is not None and position == request.num_prompt_tokens + stop_after - 1:
            return EOS
        return token(spec["seed"], position)

    def _propose(self, output: SchedulerOutput) -> None:
        count = self.settings["num_speculative_tokens"]
        proposals = {}
        for request_id in output.num_scheduled_tokens if count and not self.settings["async_scheduling"] else ():
            request = self.sched.requests.get(request_id)
            if request is None or request.num_computed_tokens < request.num_prompt_tokens:
                continue
            start = request.num_tokens
            right = (self.specs[request_id]["seed"] + start) % (count + 1)
            proposals[request_id] = [
                self._token_at(request, start + j) if j < right else 49999 - j for j in range(count)
            ]
        self.sched.update_draft_token_ids(DraftTokenIds(list(proposals), list(proposals.values())))

    # ---- steps and records ----------------------------------------------------------------------------------

    def _schedule(self, record: Json) -> int:
        output = self.sched.schedule()
        self.sequence += 1
        record["s"] = self.sequence
        self.queue.append((self.sequence, output, self._sample(output)))
        record.update({key: value for key, value in self._events(output).items() if value})
        num = self.numbers
        self._set_state(record, "tok", [[num[r], n] for r, n in output.num_scheduled_tokens.items()])
        self.preempted = []
        return output.total_num_scheduled_tokens

    def _events(self, output: SchedulerOutput) -> Json:
        num, cached = self.numbers, output.scheduled_cached_reqs
        new = {data.req_id: data for data in output.scheduled_new_reqs}
        tables = {request_id: data.block_ids[0] for request_id, data in new.items()}
        hits = {request_id: data.num_computed_tokens for request_id, data in new.items()}
        for request_id, blocks, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if blocks and blocks[0]:
                tables[request_id] = blocks[0]
            if request_id in cached.resumed_req_ids:
                hits[request_id] = computed
        order = output.num_scheduled_tokens
        assert set(self.preempted) == set(output.preempted_req_ids)
        return {
            "new": [num[r] for r in order if r in new],
            "res": [num[r] for r in order if r in cached.resumed_req_ids],
            "pre": [num[r] for r in self.preempted],
            "fin": sorted(num[r] for r in output.finished_req_ids),
            "hit": [[num[r], hits[r]] for r in order if r in hits],
            "spec": [[num[r], len(drafts)] for r, drafts in output.scheduled_spec_decode_tokens.items()],
            "nb": {str(num[r]): list(tables[r]) for r in order if r in tables},
        }

    def _update(self, record: Json) -> None:
        sequence, output, sampled = self.queue.popleft()
        request_ids = list(output.num_scheduled_tokens)
        late = zip(request_ids, sampled, strict=True)
        sampled = [self._sample_late(r, output) if tokens == [UNKNOWN] else tokens for r, tokens in late]
        result = ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(request_ids)},
            sampled_token_ids=sampled,
        )
        by_client = self.sched.update_from_output(output, result)
        outputs = [one for group in by_client.values() for one in group.outputs]
        self._propose(output)
        record["u"] = sequence
        record["nout"] = sum(len(one.new_token_ids) for one in outputs)
        done = [
            [self.numbers[one.request_id], str(one.finish_reason)] for one in outputs if one.finish_reason is not None
        ]
        if done:
            record["done"] = done

    def _close(self, record: Json) -> None:
        sched, num = self.sched, self.numbers
        self._set_state(record, "run", [num[request.request_id] for request in sched.running])
        self._set_state(record, "wait", [num[request.request_id] for request in sched.waiting])
        self._set_state(record, "free", sched.kv_cache_manager.block_pool.get_num_free_blocks())
        self._set_state(record, "kvw", [num[request.request_id] for request in sched.kv_holding_waiting])
        self._set_state(record, "def", sorted(num[request.request_id] for request in sched.deferred_waiting))
        tables = {r: len(sched.kv_cache_manager.get_block_ids(r)[0]) for r in sched.requests}
        changed = {str(num[r]): tables.get(r, 0) for r in num if tables.get(r, 0) != self.tables.get(r, 0)}
        if changed:
            record["blk"] = changed
        self.tables = tables
        self.records.append(record)

    def _set_state(self, record: Json, key: str, value: Any) -> None:
        if self.state[key] != value:
            self.state[key] = value
            record[key] = value


def record(trace: Json) -> Json:
    """What vLLM's scheduler does with a trace."""
    return Recording(trace).run()
