"""``python -m kvarn demo``: a real language model with a 16-bit cache and with packed ones."""

from kvarn.demo.main import run

__all__ = ["run"]
