"""The door: what is refused before it becomes a request. Each refusal names the value, the limit and the way out."""

from collections.abc import Collection, Sequence

from schedtop.engine.encoder.cache import MediaItem
from schedtop.engine.errors import PromptTooLong, QueueFull, RequestRefused
from schedtop.engine.sampling_params import SamplingParams
from schedtop.engine.sched.interface import SchedulerInterface

MAX_ID_LENGTH = 256


def check_at_the_door(
    sched: SchedulerInterface,
    request_id: str,
    prompt_token_ids: list[int],
    sampling: SamplingParams,
    adapter: str | None,
    vocab_size: int | None,
) -> None:
    """Raise `RequestRefused` if the request can never run here, `QueueFull` if the queue's bounds are reached."""
    _check_identity(sched, request_id)
    sampling.check()
    if not prompt_token_ids:
        raise RequestRefused("the prompt is empty: give at least one token")
    check_token_ids("prompt", prompt_token_ids, vocab_size)
    check_token_ids("logit_bias", sampling.logit_bias, vocab_size)
    check_token_ids("stop_token_ids", sampling.stop_token_ids, vocab_size)
    check_token_ids("bad_words_ids", [token for word in sampling.bad_words_ids for token in word], vocab_size)
    _check_size(sched, len(prompt_token_ids))
    _check_adapter(sched, adapter)
    _check_queue(sched, len(prompt_token_ids))


def _check_adapter(sched: SchedulerInterface, adapter: str | None) -> None:
    if adapter is None:
        return
    known = sched.config.adapters
    if not sched.config.max_adapters:
        raise RequestRefused(f"adapter {adapter!r} asked for, but this engine was started without adapter slots")
    if known and adapter not in known:
        raise RequestRefused(f"adapter {adapter!r} isn't loaded here; loaded are {', '.join(known)}")


def _check_identity(sched: SchedulerInterface, request_id: str) -> None:
    if not 0 < len(request_id) <= MAX_ID_LENGTH:
        raise RequestRefused(f"a request id has 1 to {MAX_ID_LENGTH} characters, this one has {len(request_id)}")
    if request_id in sched.requests:
        raise RequestRefused(f"request id {request_id!r} is in use by a live request; choose another")
    if sched.kv.is_transferring(request_id):
        raise RequestRefused(f"request id {request_id!r} is in use by a KV transfer under way; choose another")


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int | None) -> None:
    """Raise `RequestRefused` for a token the model doesn't have: in the runner it would hurt a whole step."""
    if not token_ids:
        return
    low, high = min(token_ids), max(token_ids)
    if low < 0:
        raise RequestRefused(f"{name}: token id {low} is below 0")
    if vocab_size is not None and high >= vocab_size:
        raise RequestRefused(f"{name}: token id {high} is outside the vocabulary of {vocab_size} tokens")


def _check_size(sched: SchedulerInterface, num_tokens: int) -> None:
    config = sched.config
    if config.max_model_len is not None and num_tokens > config.max_model_len - 1:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, the limit is {config.max_model_len - 1} "
            f"(max_model_len {config.max_model_len} less one for the answer); shorten it"
        )
    if num_tokens > config.usable_tokens:
        raise PromptTooLong(
            f"the prompt has {num_tokens} tokens, the whole KV pool holds {config.usable_tokens} "
            f"({config.num_usable_blocks} blocks of {config.block_size}); shorten it or start with more blocks"
        )


def check_media(sched: SchedulerInterface, media: Sequence[MediaItem], num_tokens: int) -> None:
    """Raise `RequestRefused` for media that this engine can never encode, or that lie outside the prompt."""
    config = sched.config
    limit = min(config.encoder_cache_size, config.max_num_encoder_tokens)
    for item in media:
        if item.num_tokens > limit:
            raise RequestRefused(
                f"a media input has {item.num_tokens} embeddings, the encoder takes at most {limit} "
                "(encoder_cache_size, max_num_encoder_tokens); give a smaller one or start with more"
            )
        if item.offset < 0 or item.num_tokens < 1 or item.offset + item.num_tokens > num_tokens:
            raise RequestRefused(
                f"a media input at {item.offset} of {item.num_tokens} tokens is outside the prompt of {num_tokens}"
            )


def _check_queue(sched: SchedulerInterface, num_tokens: int) -> None:
    knobs = sched.knobs
    if knobs.max_num_queued_reqs and sched.num_waiting >= knobs.max_num_queued_reqs:
        raise QueueFull(
            f"{sched.num_waiting} requests wait, the limit max_num_queued_reqs is {knobs.max_num_queued_reqs}; "
            "try again later"
        )
    if knobs.max_num_queued_tokens and sched.num_waiting_tokens + num_tokens > knobs.max_num_queued_tokens:
        raise QueueFull(
            f"{sched.num_waiting_tokens} tokens wait and this prompt has {num_tokens}, the limit "
            f"max_num_queued_tokens is {knobs.max_num_queued_tokens}; try again later"
        )
