"""``python -m bench.serving``: a decode step with everything in it, captured in a CUDA graph.

Rows of op "serving_step". "attention": one layer of a cache, update and attention, beside
scaled_dot_product_attention over a static 16-bit cache; small caches take turns, so that each step
finds its cache in memory, as with all layers of a model. "model": tokens per second of a model with
random weights, with a `KVarNCache` and with a `StaticCache`, over steps that fill a block of each
sequence. All sequences have the same length, since a static cache has only one. "capacity" (only
when it is asked for): the largest batch that fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import record
from bench.ceilings import read_time
from bench.harness import Timing, calls_per_graph, input_sets, time_calls
from bench.measure import WrongError
from bench.routine import relative_error
from kvarn import Format, PagedCache, _host, capacity, ops
from kvarn.cache import SequenceState

#: Distinct random records of a cache. They repeat: to quantize more is not what is timed.
_RECORDS = 64
_BACKENDS = {
    "cuDNN fp16": SDPBackend.CUDNN_ATTENTION,
    "SDPA flash fp16": SDPBackend.FLASH_ATTENTION,
    "SDPA math fp32": SDPBackend.MATH,
}
_MAX_ERROR = 2e-3  #: relative, above which nothing is timed
_PEER_STEPS = 8  #: of a model: each step over a static cache is like the others
_WARM_UP = 2  #: steps of a model that are not timed


@dataclass(frozen=True)
class Setup:
    """What is measured; the sizes are those of Qwen3-8B, but for its 36 layers."""

    device: torch.device
    format: str = "kvarn_k4v2_g128"
    batch: int = 64
    context: int = 16384  #: tokens after the last step
    layers: int = 4
    q_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    hidden: int = 4096
    intermediate: int = 12288
    vocabulary: int = 151936
    quick: bool = False

    @property
    def fmt(self) -> Format:
        return Format(self.format, head_dim=self.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.device.type == "cuda" else torch.float32

    @property
    def backends(self) -> list[str]:
        cuda = self.device.type == "cuda"
        return ["cuDNN fp16", "SDPA flash fp16"] if cuda else ["SDPA math fp32"]

    def bytes_16bit(self, layers: int) -> int:
        return 2 * layers * self.batch * self.context * self.kv_heads * self.head_dim * 2

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=self.dtype, device=self.device)


# A layer ---------------------------------------------------------------------------------------


def attention(setup: Setup, seals: int) -> dict[str, Any]:
    """A layer's decode step: ``seals`` tiles of the batch are sealed, a token of each sequence is
    appended and attends. A batch of G sequences seals one tile a step, on average."""
    fmt, batch = setup.fmt, setup.batch
    lengths = [setup.context - 1] * batch
    lengths[:seals] = [(setup.context // fmt.group - 1) * fmt.group - 1] * seals
    num_bytes = _bytes_read(setup, lengths)
    steps = [_layer_step(setup, lengths, seals) for _ in range(input_sets(num_bytes, setup.device))]
    error = max(error for _, error in steps)
    if not error <= _MAX_ERROR:
        raise WrongError(f"attention is wrong by {error:.1e}")
    timing = _timed([step for step, _ in steps], setup, num_bytes)
    row = {
        "op": "serving_step",
        "format": setup.format,
        "case": {
            "what": "attention",
            "batch": batch,
            "context": setup.context,
            "group_size": setup.q_heads // setup.kv_heads,
            "head_dim": setup.head_dim,
            "seals": seals,
        },
        "time_us": round(timing.median, 3),
        "p10_us": round(timing.p10, 3),
        "p90_us": round(timing.p90, 3),
        "runs": timing.runs,
        "bytes": num_bytes,
        "gbps": round(num_bytes / timing.median / 1e3, 3),
        "read_us": round(read_time(num_bytes, setup.device, quick=setup.quick).median, 3),
        "error": error,
        "bytes_16bit": setup.bytes_16bit(1),
    }
    del steps  # the peers need the memory
    return row | _peers({name: partial(_static_attention, setup, name) for name in setup.backends})


def _timed(calls: Sequence[Callable[[], object]], setup: Setup, num_bytes: int) -> Timing:
    together = calls_per_graph(num_bytes, setup.device)
    return time_calls(calls, setup.device, together=together, quick=setup.quick)


def _layer_step(
    setup: Setup, lengths: Sequence[int], seals: int
) -> tuple[Callable[[], Tensor], float]:
    """The step of a new cache, and its error."""
    fmt, batch = setup.fmt, setup.batch
    blocks = -(-setup.context // fmt.group)
    cache = PagedCache(
        fmt,
        num_layers=1,
        num_kv_heads=setup.kv_heads,
        num_blocks=batch * blocks,
        num_slots=batch * 4,
        dtype=setup.dtype,
        device=setup.device,
    )
    seqs = [cache.import_sequence(state) for state in _random_states(setup, 1, lengths)]
    q = setup.normal(batch, setup.q_heads, setup.head_dim)
    key, value = setup.normal(2, batch, setup.kv_heads, setup.head_dim)
    step = cache.graph_step(batch, blocks * fmt.group)
    out = torch.empty_like(q)
    attend = partial(cache.attend, step, 0, q, key, value, out=out)
    if seals:  # these fill a block, which the timed step seals
        cache.plan([(seq, 1) for seq in seqs[:seals]], into=step)
        attend()
        cache.commit(step)
    cache.plan([(seq, 1) for seq in seqs], into=step)
    attend()
    return attend, max(_error(setup, cache, seqs[b], q[b], out[b]) for b in {0, batch - 1})


@functools.cache
def _static_attention(setup: Setup, backend: str) -> float:
    """The same over key and value [B, Hkv, context, D], full but for the new token."""
    num_bytes = setup.bytes_16bit(1)
    steps = [_static_step(setup, backend) for _ in range(input_sets(num_bytes, setup.device))]
    return round(_timed(steps, setup, num_bytes).median, 3)


def _static_step(setup: Setup, backend: str) -> Callable[[], Tensor]:
    key, value = setup.normal(
        2, setup.batch, setup.kv_heads, setup.context, setup.head_dim
    ).unbind()
    new_key, new_value = setup.normal(2, setup.batch, setup.kv_heads, 1, setup.head_dim)
    # The heads of a group as rows: keys and values need not be repeated.
    group = setup.q_heads // setup.kv_heads
    q = setup.normal(setup.batch, setup.kv_heads, group, setup.head_dim)
    at = torch.tensor([setup.context - 1], device=setup.device)

    def step() -> Tensor:
        key.index_copy_(2, at, new_key)
        value.index_copy_(2, at, new_value)
        with sdpa_kernel(_BACKENDS[backend]):
            return F.scaled_dot_product_attention(q, key, value)

    return step


def _random_states(setup: Setup, layers: int, lengths: Sequence[int]) -> Iterator[SequenceState]:
    """Sequences of random keys and values, in the state of a cache with one sink block and one
    recent block."""
    fmt = setup.fmt
    tiles = setup.normal(2, _RECORDS, fmt.group, setup.kv_heads, setup.head_dim)
    records = ops.quantize_tiles(*tiles, fmt)
    pages = tiles.permute(1, 0, 3, 2, 4)  # [tiles, 2, Hkv, G, D]
    for length in lengths:
        full, blocks = length // fmt.group, -(-length // fmt.group)
        staged = tuple(i < 1 or i >= full - 1 for i in range(blocks))
        choice = torch.randint(_RECORDS, (layers, blocks), device=setup.device)
        yield SequenceState(
            fmt=fmt,
            layout_version=_host.layout_version,
            length=length,
            staged=staged,
            records=records[choice[:, : blocks - sum(staged)]],
            pages=pages[choice[:, blocks - sum(staged) :]],
        )


def _bytes_read(setup: Setup, lengths: Sequence[int]) -> int:
    """Records and staged rows of all sequences, of one layer."""
    fmt, total = setup.fmt, 0
    for length in lengths:
        records = max(0, length // fmt.group - 2)
        rows = length + 1 - records * fmt.group
        total += records * fmt.record_bytes + rows * 2 * setup.head_dim * setup.dtype.itemsize
    return total * setup.kv_heads


def _error(setup: Setup, cache: PagedCache, seq: int, q: Tensor, out: Tensor) -> float:
    """Of a sequence's attention, against float64 over what `ops.gather_kv` reads."""
    blocks = torch.tensor([cache.blocks(seq)], dtype=torch.int32, device=setup.device)
    length = cache.length(seq) + 1
    key, value = ops.gather_kv(
        cache.cache[0],
        blocks,
        torch.tensor([length], dtype=torch.int32, device=setup.device),
        setup.fmt,
        staging=cache.staging[0],
        block_slot=cache.block_slot,
        cu_seq_lens=torch.tensor([0, length], dtype=torch.int32, device=setup.device),
        total_tokens=length,
    )
    group = setup.q_heads // setup.kv_heads
    key, value = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (key, value))
    weight = (q.double()[:, None] @ key.mT / setup.head_dim**0.5).softmax(-1)
    return relative_error(out, (weight @ value)[:, 0])


def _peers(measurements: dict[str, Callable[[], float]]) -> dict[str, Any]:
    peers: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name, measure in measurements.items():
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        # Whatever a peer raises, it must not cost the rest of the run.
        try:
            peers[name] = measure()
        except Exception as raised:
            skipped[name] = f"{type(raised).__name__}: {(str(raised).splitlines() or [''])[0]}"
    return {"peers": peers, "skipped": skipped}


# A model ---------------------------------------------------------------------------------------


def model(setup: Setup, steps: int) -> dict[str, Any]:
    """Greedy decoding of ``steps`` tokens per sequence, the last of which is number ``context``."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=setup.vocabulary,
        hidden_size=setup.hidden,
        intermediate_size=setup.intermediate,
        num_hidden_layers=setup.layers,
        num_attention_heads=setup.q_heads,
        num_key_value_heads=setup.kv_heads,
        head_dim=setup.head_dim,
        max_position_embeddings=2 * setup.context,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    with torch.device(setup.device):
        network = Qwen3ForCausalLM(config).to(setup.dtype).eval().requires_grad_(False)
    measurements = {
        name: partial(_static_model, setup, network, name, min(steps, _PEER_STEPS))
        for name in ("transformers SDPA", *setup.backends)
    }
    seconds, cache_bytes = _kvarn_model(setup, network, steps)
    return {
        "op": "serving_step",
        "format": setup.format,
        "case": {
            "what": "model",
            "batch": setup.batch,
            "context": setup.context,
            "layers": setup.layers,
            "steps": steps,
        },
        "time_us": round(seconds / steps * 1e6, 3),
        "tokens_per_s": round(setup.batch * steps / seconds, 1),
        "cache_bytes": cache_bytes,
        "bytes_16bit": setup.bytes_16bit(setup.layers),
        **_peers(measurements),
    }


def _kvarn_model(setup: Setup, network: Any, steps: int) -> tuple[float, int]:
    """Seconds of all steps, and the bytes of the cache."""
    from kvarn.integrations.transformers import DecodeGraph, KVarNCache

    network.set_attn_implementation("kvarn")
    cache = KVarNCache(network.config, setup.format, max_tokens=setup.context)
    ids = torch.randint(setup.vocabulary, (setup.batch, 1), device=setup.device)
    network(ids, past_key_values=cache)
    cache.reset()
    # A prompt of that length would take longer than all that is measured.
    assert cache.paged is not None
    start = setup.context - steps - _WARM_UP
    states = _random_states(setup, setup.layers, [start] * setup.batch)
    cache._seqs = [cache.paged.import_sequence(state) for state in states]
    cache._columns = [(start, None)]
    decode = DecodeGraph(network, cache)
    for _ in range(_WARM_UP):
        decode(ids)
    return _seconds(decode, ids, steps, setup.device), cache.memory_bytes()


def _static_model(setup: Setup, network: Any, attention: str, steps: int) -> float:
    """Microseconds of a step. A step that serves every length up to ``context`` attends to
    ``context`` slots; but for transformers' own attention, nothing is masked."""
    from transformers import AttentionInterface, AttentionMaskInterface, StaticCache

    if attention == "transformers SDPA":
        network.set_attn_implementation("sdpa")
    else:
        AttentionInterface.register("kvarn_bench", partial(_grouped, _BACKENDS[attention]))
        AttentionMaskInterface.register("kvarn_bench", lambda *args, **kwargs: None)
        network.set_attn_implementation("kvarn_bench")
    cache = StaticCache(config=network.config, max_cache_len=setup.context)
    cache.early_initialization(
        setup.batch, setup.kv_heads, setup.head_dim, setup.dtype, setup.device
    )
    start = setup.context - steps - _WARM_UP
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    ids = torch.randint(setup.vocabulary, (setup.batch, 1), device=setup.device)
    position_ids = torch.full((setup.batch, 1), start, device=setup.device)

    def rewind() -> None:
        position_ids.fill_(start)
        for layer in cache.layers:
            layer.cumulative_length.fill_(start)

    def forward() -> Tensor:
        logits: Tensor = network(ids, position_ids=position_ids, past_key_values=cache).logits
        position_ids.add_(1)
        return logits

    rewind()
    replay = _captured(forward, setup.device)
    rewind()

    def decode(new: Tensor) -> Tensor:
        ids.copy_(new)
        return replay()

    for _ in range(_WARM_UP):
        replay()
    return round(_seconds(decode, ids.clone(), steps, setup.device) / steps * 1e6, 3)


def _grouped(
    backend: SDPBackend, module: object, q: Tensor, key: Tensor, value: Tensor, *args: Any, **_: Any
) -> tuple[Tensor, None]:
    """One query row a head over a full cache; the heads of a group as rows."""
    batch, heads, _, dim = q.shape
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(q.view(batch, key.shape[1], -1, dim), key, value)
    return out.reshape(batch, 1, heads, dim), None


def _captured(forward: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    """As a CUDA graph. On the CPU it is just called."""
    if device.type != "cuda":
        return forward
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        forward()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits = forward()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay


def _seconds(
    decode: Callable[[Tensor], Tensor], ids: Tensor, steps: int, device: torch.device
) -> float:
    """By the clock on the wall: what the host does counts."""
    synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        ids = decode(ids)[:, -1:].argmax(-1)
    synchronize()
    return time.perf_counter() - start


# Memory ----------------------------------------------------------------------------------------


def largest_batch(setup: Setup) -> dict[str, Any]:
    """How many sequences of ``context`` tokens the device's free memory holds, by allocating their
    cache: ours with a sink and a recent block a sequence, and in 16 bits; and what
    `kvarn.capacity` says."""
    fmt, layers, context = setup.fmt, setup.layers, setup.context
    blocks = -(-context // fmt.group)

    def ours(batch: int) -> object:
        return PagedCache(
            fmt,
            num_layers=layers,
            num_kv_heads=setup.kv_heads,
            num_blocks=batch * blocks,
            num_slots=batch * 3,
            dtype=setup.dtype,
            device=setup.device,
        )

    def plain(batch: int) -> object:
        shape = (2, batch, setup.kv_heads, context, setup.head_dim)
        return [torch.empty(shape, dtype=torch.float16, device=setup.device) for _ in range(layers)]

    torch.cuda.empty_cache()
    memory = torch.cuda.mem_get_info(setup.device)[0]
    expected = capacity.compare(
        capacity.ModelShape(layers, setup.kv_heads, setup.head_dim),
        memory=memory,
        context=context,
        formats=[setup.format],
    )
    return {
        "op": "serving_step",
        "format": setup.format,
        "case": {"what": "capacity", "context": context, "layers": layers},
        "memory_bytes": memory,
        "batch": _most(ours, 2 * expected[-1].sequences),
        "batch_16bit": _most(plain, 2 * expected[0].sequences),
        "predicted": expected[-1].sequences,
        "predicted_16bit": expected[0].sequences,
    }


def _most(allocate: Callable[[int], object], bound: int) -> int:
    """The largest number below ``bound`` for which there is memory."""
    low, high = 0, bound
    while high - low > 1:
        middle = (low + high) // 2
        try:
            allocate(middle)
            low = middle
        except RuntimeError as error:  # torch's, which is one, or the driver's
            if "out of memory" not in str(error):
                raise
            high = middle
        torch.cuda.empty_cache()
    return low


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.serving", description=__doc__)
    default = Setup(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    parser.add_argument("--device", type=torch.device, default=default.device)
    parser.add_argument("--format", default=default.format, metavar="NAME")
    sizes = [
        field.name
        for field in dataclasses.fields(Setup)
        if type(getattr(default, field.name)) is int
    ]
    for name in sizes:
        value = getattr(default, name)
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=int, default=value, help=f"(default: {value})"
        )
    parser.add_argument(
        "--sizes", nargs="+", type=_size, metavar="BxC", help="several batches and contexts"
    )
    parser.add_argument("--steps", type=int, help="of the model (default: G)")
    parser.add_argument("--what", nargs="+", choices=("attention", "model", "capacity"))
    parser.add_argument("--quick", action="store_true", help="fewer runs")
    parser.add_argument("--out", type=Path, help="write the rows to this JSON file")
    parser.add_argument("--commit", help="what to record as the commit, where git is not at hand")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    setup = Setup(
        args.device,
        format=args.format,
        quick=args.quick,
        **{name: getattr(args, name) for name in sizes},
    )
    what = args.what or ["attention", "model"]
    if "capacity" in what and setup.device.type != "cuda":
        parser.error("--what capacity needs a GPU")
    runs: list[Callable[[], dict[str, Any]]] = []
    for batch, context in args.sizes or [(setup.batch, setup.context)]:
        sized = dataclasses.replace(setup, batch=batch, context=context)
        if "attention" in what:
            runs += [partial(attention, sized, seals) for seals in (0, 1)]
        if "model" in what:
            runs.append(partial(model, sized, args.steps or setup.fmt.group))
        if "capacity" in what:
            runs.append(partial(largest_batch, sized))
    rows = []
    facts = record.machine(setup.device, args.commit)
    for run in runs:
        if setup.device.type == "cuda":
            gc.collect()  # of the run before: a model is garbage in cycles
            torch.cuda.empty_cache()
        with torch.no_grad():
            rows.append(run())
        print(_line(rows[-1]), flush=True)
        if args.out:
            record.save(args.out, facts, rows)
    return 0


def _size(text: str) -> tuple[int, int]:
    batch, context = text.split("x")
    return int(batch), int(context)


def _line(row: dict[str, Any]) -> str:
    if row["case"]["what"] == "capacity":
        return (
            f"{row['case']}: {row['batch']} sequences ({row['predicted']} predicted), in 16 bits "
            f"{row['batch_16bit']} ({row['predicted_16bit']})"
        )
    peers = [f"{name} {time / row['time_us']:.2f}x" for name, time in row["peers"].items()]
    peers += [f"{name}: {reason}" for name, reason in row["skipped"].items()]
    rate = f", {row['tokens_per_s']:,.0f} tokens/s" if "tokens_per_s" in row else ""
    return f"{row['case']}: {row['time_us']:,.1f} us{rate}; {'; '.join(peers)}"


if __name__ == "__main__":
    sys.exit(main())
