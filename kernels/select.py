"""Chooses an attention backend at start and says why. Backends are imported only when they are looked at."""

from importlib import import_module

from schedtop.kernels.attention import AttentionBackend, AttentionSpec

BACKENDS = {
    "reference": ("schedtop.kernels.reference", "ReferenceAttention"),
    "cpu": ("schedtop.kernels.cpu", "CpuAttention"),
    "flash": ("schedtop.kernels.flash", "FlashAttention"),
    "triton": ("schedtop.kernels.triton", "TritonAttention"),
    "sdpa": ("schedtop.kernels.sdpa", "SdpaAttention"),
}
PREFERENCE = {"cpu": ("cpu", "sdpa"), "cuda": ("flash", "triton", "sdpa")}
"""By device, best first; the last one works everywhere."""


def choose_backend(spec: AttentionSpec, wanted: str = "auto") -> tuple[AttentionBackend, str]:
    """The backend and why it was chosen. Raises `ValueError` when `wanted` is unknown or can't do `spec`."""
    if wanted != "auto":
        return _the_wanted(spec, wanted)
    passed_over: list[str] = []
    for name in PREFERENCE[spec.device]:
        backend = make_backend(name)
        reason = backend.refuses(spec)
        if reason is None:
            return backend, "; ".join(passed_over) or f"the fastest for {spec.device}"
        passed_over.append(f"{name} is out: {reason}")
    raise ValueError(f"no attention backend fits: {'; '.join(passed_over)}")


def make_backend(name: str) -> AttentionBackend:
    """Import and build one backend."""
    module, class_name = BACKENDS[name]
    backend: AttentionBackend = getattr(import_module(module), class_name)()
    return backend


def _the_wanted(spec: AttentionSpec, wanted: str) -> tuple[AttentionBackend, str]:
    if wanted not in BACKENDS:
        raise ValueError(f"attention backend {wanted} is unknown: choose from auto, {', '.join(BACKENDS)}")
    backend = make_backend(wanted)
    if (reason := backend.refuses(spec)) is not None:
        raise ValueError(f"attention backend {wanted} can't be used: {reason}")
    return backend, "asked for"
