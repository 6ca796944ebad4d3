"""What ``python -m kvarn demo`` does, in order."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from kvarn import _backends, _progress
from kvarn._terminal import Table, binary_bytes
from kvarn.demo import configurations, figures, generation
from kvarn.demo.configurations import Configuration
from kvarn.demo.generation import Sample
from kvarn.studies import divergence, models, texts
from kvarn.studies.divergence import Run, Trace
from kvarn.studies.models import LoadedModel

_GROUP = 128
# Before this token not every cache has a packed tile: sinks, the first tile, a recent one.
_WARM_UP = 3 * _GROUP
_FORMATS = ("kvarn_k4v4_g128", "kvarn_k4v2_g128", "kvarn_k2v2_g128")


def run(
    *,
    model: Path | None = None,
    text: Path | None = None,
    tokens: int | None = None,
    formats: Sequence[str] | None = None,
    out: Path = Path("demo-output"),
    memory: int = 2**30,
    quick: bool = False,
) -> int:
    """Compares caches on one text and prints and draws what came out.

    Args:
        model: a local Hugging Face folder or GGUF file; None: SmolLM2-135M-Instruct.
        text: a text file; None: Python's language reference.
        tokens: of the text that are read.
        formats: of the packed caches; the first is also run as the paper has it.
        out: folder for the figures and ``results.json``.
        memory: bytes, for the number of tokens that fit.
        quick: shorter text, fewer configurations.
    """
    console = Console()
    tokens = tokens or (768 if quick else 1024)
    if tokens <= _WARM_UP:
        raise ValueError(f"kvarn demo: tokens must be more than {_WARM_UP}, got {tokens}")
    words = texts.python_reference() if text is None else text.read_text(encoding="utf-8")
    device = _device()
    out.mkdir(parents=True, exist_ok=True)

    with _progress.progress(console) as progress:
        loading = progress.add_task("Loading the model", total=1)
        loaded = _load(model, device)
        progress.update(
            loading, advance=1, description=f"Loading {loaded.name} ({_describe(loaded)})"
        )
        exact, rows = _choose(loaded, formats, quick)
        (ids,) = loaded.segments(words, tokens)

        work = tokens * (1 + len(rows))
        reading = progress.add_task(
            f"Reading {tokens:,} tokens of text with {1 + len(rows)} caches", total=work
        )
        exact_cache = exact.run.make_cache()
        exact_trace, traces = divergence.teacher_forced(
            loaded.model,
            ids,
            Run(lambda: exact_cache, exact.run.attention),
            {row.name: row.run for row in rows},
            tile=_GROUP,
            progress=lambda done: progress.advance(reading, done),
        )

        steps = 24 if quick else 48
        question = generation.prompt(loaded, ids[: 384 if quick else 640])
        everything = [exact, *rows]
        writing = progress.add_task(
            f"Answering a question about it ({len(question)} tokens of prompt)",
            total=(len(question) + steps) * len(everything),
        )
        samples = [
            generation.greedy(
                loaded, row.run, question, steps, tile=_GROUP,
                progress=lambda done: progress.advance(writing, done),
            )
            for row in everything
        ]  # fmt: skip

        drawing = progress.add_task("Drawing", total=3)
        by_row = dict(zip(rows, traces.values(), strict=True))
        figures.rotation(out / "rotation.png", figures.keys_of(exact_cache), _GROUP, _GROUP)
        progress.advance(drawing)
        figures.error_by_position(
            out / "error-by-position.png", by_row, group=_GROUP, first=_WARM_UP
        )
        progress.advance(drawing)
        figures.memory(out / "memory.png", everything, memory, binary_bytes(memory))
        progress.advance(drawing)

    all_traces = [exact_trace, *traces.values()]
    console.print()
    _summary(everything, all_traces, samples, memory, loaded, text).print()
    _positions(rows, list(traces.values())).print()
    _print_samples(console, everything, samples)
    results = _results(everything, all_traces, samples, memory)
    facts = {"model": loaded.name, "device": _describe(loaded), "tokens": tokens}
    (out / "results.json").write_text(json.dumps({**facts, "rows": results}, indent=2) + "\n")
    names = "rotation.png, error-by-position.png, memory.png, results.json"
    console.print(f"Written to {out}: {names}", soft_wrap=True)
    return 0


# --------------------------------------------------------------------------------------------------
# Preparing


def _device() -> torch.device:
    cuda = torch.device("cuda")
    return cuda if _backends.why_missing(cuda) is None else torch.device("cpu")


def _load(path: Path | None, device: torch.device) -> LoadedModel:
    """In fp32 on the CPU; on a GPU in the model's own 16-bit type, fp16 if it has none."""
    transformers.logging.set_verbosity_error()
    dtype = torch.float32 if device.type == "cpu" else torch.float16
    if device.type != "cpu" and path is not None and path.is_dir():
        config = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
        own = config.get_text_config().dtype
        dtype = own if own in (torch.float16, torch.bfloat16) else dtype
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars under our own
        return models.load_model(path, dtype=dtype, device=str(device))


def _describe(loaded: LoadedModel) -> str:
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    device = loaded.model.device
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{dtype} on {where}"


def _choose(
    loaded: LoadedModel, formats: Sequence[str] | None, quick: bool
) -> tuple[Configuration, list[Configuration]]:
    """The exact cache, and what is compared with it."""
    names = list(formats or (_FORMATS[1:2] if quick else _FORMATS))
    rows = [configurations.packed(loaded, name) for name in names]
    paper = "kvarn_k4v2_g128"
    if paper in names:
        rows.append(
            configurations.packed(
                loaded, paper, fit="minmax", recent_blocks=0, label="k4v2 (paper)"
            )
        )
    rows.append(configurations.naive(loaded, 4, 2))
    rows.append(configurations.naive(loaded, 2, 2))
    return configurations.exact(loaded), rows


# --------------------------------------------------------------------------------------------------
# Reporting


def _summary(
    rows: Sequence[Configuration],
    traces: Sequence[Trace],
    samples: Sequence[Sample],
    memory: int,
    loaded: LoadedModel,
    text: Path | None,
) -> Table:
    title = f"{loaded.name}, {_describe(loaded)}, {len(traces[0].kl):,} tokens of " + (
        "Python's language reference" if text is None else text.name
    )
    return Table(
        title,
        (
            "cache", "bytes per token", "smaller", f"tokens in {binary_bytes(memory)}", "tokens/s",
            "KL", "top-1", "ppl.",
        ),
        [
            (
                row.name,
                f"{row.bytes_per_token:,.0f}",
                f"{rows[0].bytes_per_token / row.bytes_per_token:.2f}x",
                f"{row.longest_sequence(memory):,}",
                "-" if row.comparator else f"{sample.tokens_per_second:.1f}",
                _number(trace.mean_kl(_WARM_UP)) if i else "0",
                f"{trace.top1(_WARM_UP):.3f}",
                f"{trace.perplexity(_WARM_UP):.2f}",
            )
            for i, (row, trace, sample) in enumerate(zip(rows, traces, samples, strict=True))
        ],
        caption="KL: of the next-token distribution from that with the 16-bit cache (nats).\n"
        "Top-1: how often both find the same token likeliest. Both, and the perplexity\n"
        f"(ppl.), from token {_WARM_UP} on. Tokens/s: greedy decoding of one sequence.\n"
        "(paper): fit minmax, no recent block in 16 bits. Naive rounding is simulated.",
    )  # fmt: skip


def _number(kl: float) -> str:
    """Rounding may leave a divergence of 0 a little below it."""
    return f"{max(kl, 0.0):.4f}"


def _positions(rows: Sequence[Configuration], traces: Sequence[Trace]) -> Table:
    tokens = len(traces[0].kl)
    bounds = [_WARM_UP + (tokens - _WARM_UP) * i // 3 for i in range(4)]
    spans = list(itertools.pairwise(bounds))
    return Table(
        "KL (top-1 agreement) by position in the text",
        ("cache", *(f"{start}-{stop - 1}" for start, stop in spans)),
        [
            (row.name, *(f"{_number(t.mean_kl(*span))} ({t.top1(*span):.3f})" for span in spans))
            for row, t in zip(rows, traces, strict=True)
        ],
    )


def _print_samples(
    console: Console, rows: Sequence[Configuration], samples: Sequence[Sample]
) -> None:
    console.print("What the model answers about the beginning of the text", style="bold")
    for row, sample in zip(rows, samples, strict=True):
        console.print(row.name, style="cyan", highlight=False)
        console.print(Padding(Text(" ".join(sample.text.split())), (0, 0, 0, 4)))
    console.print()


def _results(
    rows: Sequence[Configuration],
    traces: Sequence[Trace],
    samples: Sequence[Sample],
    memory: int,
) -> list[dict[str, Any]]:
    return [
        {
            "cache": row.name,
            "bytes_per_token": row.bytes_per_token,
            "longest_sequence": row.longest_sequence(memory),
            "kl": trace.mean_kl(_WARM_UP),
            "top1": trace.top1(_WARM_UP),
            "perplexity": trace.perplexity(_WARM_UP),
            "kl_by_token": [round(float(kl), 7) for kl in trace.kl],
            "sample": dataclasses.asdict(sample),
        }
        for row, trace, sample in zip(rows, traces, samples, strict=True)
    ]
