"""Builds the compiled attention kernel. All else is in `pyproject.toml`.

The kernel is optional: where there is no C++ compiler the build goes on without it, and the engine computes attention
with torch instead, saying so at start.
"""

from setuptools import Extension, setup

KERNEL = Extension(
    "schedtop.kernels._paged_attention",
    sources=["src/schedtop/kernels/csrc/paged_attention.cpp"],
    depends=["src/schedtop/kernels/csrc/paged_body.inc"],
    language="c++",
    # No -march: the kernel picks its instruction set at run time. OpenMP is compiled for but not linked: the symbols
    # come from the runtime that torch brings, as two runtimes in one process fight for the cores.
    extra_compile_args=["-O3", "-std=c++17", "-fopenmp", "-fvisibility=hidden", "-g0"],
    optional=True,
    py_limited_api=True,
)

setup(ext_modules=[KERNEL])
