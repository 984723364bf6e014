"""schedtop: eyes and hands for a running LLM inference engine."""

__version__ = "0.1.0"
