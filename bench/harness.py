"""Timing: medians over rotating inputs, so that no call finds its data in a cache.

A routine hands over one callable per input set. The sets together exceed twice the last-level
cache, calls go round them, and so every call reads memory. On a CPU they are timed by the clock of
the process; on a GPU by device events around the replay of a CUDA graph, which holds one call, or
several where one is so short that the start of the graph would show.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

Call = Callable[[], object]

#: Never fewer timed calls than this (bench.md); `--quick` lowers it, and the results say how many.
MIN_RUNS = 50
QUICK_RUNS = 10
#: Seconds that a measurement takes at least: a CPU needs more of them to sit out its neighbours.
MIN_SECONDS = {"cpu": 0.5, "cuda": 0.1}
QUICK_SHARE = 0.2
MAX_SECONDS = 8.0
#: A graph holds calls that move at least this much, but no more than so many of them.
GRAPH_BYTES = 64 << 20
MAX_GRAPH_CALLS = 20
#: The GPU spins for so long (about 0.1 ms) before each replay, so that the host is ahead of it and
#: the time of submitting the graph is not measured.
SPIN_CYCLES = 200_000


@dataclass(frozen=True)
class Timing:
    """Microseconds per call."""

    median: float
    p10: float
    p90: float
    runs: int


def cache_bytes(device: torch.device) -> int:
    """The bytes of the last-level cache that a cold measurement has to displace."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return _cpu_cache_bytes()


def input_sets(bytes_per_set: int, device: torch.device) -> int:
    """How many input sets a cold measurement needs: together more than twice the cache."""
    return max(2, 2 * cache_bytes(device) // max(bytes_per_set, 1) + 1)


def calls_per_graph(num_bytes: int, device: torch.device) -> int:
    """How many calls that move `num_bytes` each are timed together."""
    if device.type != "cuda":
        return 1
    return min(max(GRAPH_BYTES // max(num_bytes, 1), 1), MAX_GRAPH_CALLS)


def time_calls(
    calls: Sequence[Call], device: torch.device, *, together: int = 1, quick: bool = False
) -> Timing:
    """Median, p10 and p90 of the time of one call, in microseconds; on a GPU of the mean of
    `together` calls in one graph."""
    min_runs = QUICK_RUNS if quick else MIN_RUNS
    min_seconds = MIN_SECONDS[device.type] * (QUICK_SHARE if quick else 1)
    one = _cuda_timer(calls, device, together) if device.type == "cuda" else _cpu_timer(calls)
    for i in range(3):
        one(i)
    times: list[float] = []
    start = time.perf_counter()
    while True:
        times.append(one(len(times)))
        seconds = time.perf_counter() - start
        if (len(times) >= min_runs and seconds >= min_seconds) or seconds >= MAX_SECONDS:
            break
    return summarize(times)


def summarize(times: Sequence[float]) -> Timing:
    """Median, first and last decile."""
    if len(times) == 1:
        return Timing(times[0], times[0], times[0], 1)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(statistics.median(times), deciles[0], deciles[-1], len(times))


def _cpu_timer(calls: Sequence[Call]) -> Callable[[int], float]:
    def one(i: int) -> float:
        call = calls[i % len(calls)]
        start = time.perf_counter_ns()
        call()
        return (time.perf_counter_ns() - start) / 1e3

    return one


def _cuda_timer(
    calls: Sequence[Call], device: torch.device, together: int
) -> Callable[[int], float]:
    graphs = []
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize(device)
    rotation = itertools.cycle(calls)
    for _ in range(-(-len(calls) // together)):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for call in itertools.islice(rotation, together):
                call()
        graphs.append(graph)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def one(i: int) -> float:
        torch.cuda._sleep(SPIN_CYCLES)
        begin.record()
        graphs[i % len(graphs)].replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3 / together

    return one


def _cpu_cache_bytes() -> int:
    """The size of the largest cache that Linux reports; 32 MiB where it reports none."""
    sizes = []
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        scale = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1:], 1)
        sizes.append(int(text.rstrip("KMG")) * scale)
    return max(sizes, default=32 << 20)
