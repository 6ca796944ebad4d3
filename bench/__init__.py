"""Microbenchmarks of kvarn's ops: ``python -m bench`` (see docs/benchmarks.md)."""
