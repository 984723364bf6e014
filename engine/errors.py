"""Errors that a client or an operator can cause. Each message names the value, the limit and the way out.

Bugs of ours are assertions, never one of these.
"""


class SchedtopError(Exception):
    """Base of all errors schedtop reports to whoever caused them."""

    code = "error"


class ConfigError(SchedtopError):
    """Start-up settings that can't work together."""

    code = "bad_config"


class RequestRefused(SchedtopError):
    """A request that can never run here, refused at the door."""

    code = "refused"


class PromptTooLong(RequestRefused):
    """The prompt fits neither the model's length nor the whole KV pool."""

    code = "prompt_too_long"


class QueueFull(RequestRefused):
    """The bounded waiting queue is full: try again later."""

    code = "queue_full"


class KnobRefused(SchedtopError):
    """A knob change that is unknown, mistyped or out of range; nothing was changed."""

    code = "knob_refused"


class Conflict(SchedtopError):
    """A change based on a state that somebody else has changed since."""

    code = "conflict"
