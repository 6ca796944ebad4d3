"""``python -m kvarn study``: what each cache does to a model's predictions, measured and drawn.

The parts, each kept as a JSON file once it is finished (`kvarn.studies.results`):

- one for each cache of `kvarn.studies.cases`: KL divergence from the exact cache, top-1 agreement
  and -log p of the text, teacher-forced, in blocks of 64 tokens for each segment of text;
- ``attention``: error of each layer's attention output, head by head;
- ``generation``: greedy generation until it first differs from the exact cache's;
- ``tiles``: a real key tile and value tile, what rotation and normalization make of them;
- ``synthetic``: encoders on made-up tiles of head dimension 128.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.progress import Progress
from torch import Tensor
from transformers import DynamicCache

from kvarn import _progress
from kvarn.studies import (
    attention_error,
    divergence,
    free_running,
    models,
    results,
    summary,
    synthetic,
    texts,
    tiles,
)
from kvarn.studies.cases import GROUP, SINKS, Case, cases, floor, ours, peer
from kvarn.studies.intervals import BLOCK
from kvarn.studies.models import LoadedModel
from kvarn.studies.results import Results
from kvarn.studies.simulated_cache import SimulatedCache

#: First token that counts: before it nothing packed has been read.
FIRST = SINKS + GROUP
# Two recent blocks, and two blocks of tokens for an interval.
_LEAST_TOKENS = FIRST + 2 * GROUP + 2 * BLOCK


@dataclass(frozen=True)
class Options:
    """What a study does.

    Attributes:
        model: a local Hugging Face folder or GGUF file; None: SmolLM2-135M-Instruct.
        text: a text file; None: Python's language reference and, if installed, the Vim manual.
        tokens: of a segment of text.
        segments: of each text.
        suite: of `kvarn.studies.cases.cases`.
        prompts, steps: of the generation.
        device: of the model; None: a GPU if there is one.
        seed: of bootstrap, made-up tiles and random rotation.
        out: folder of the results, the figures and the report.
    """

    model: Path | None = None
    text: Path | None = None
    tokens: int = 1024
    segments: int = 2
    suite: str = "standard"
    prompts: int = 8
    steps: int = 64
    device: str | None = None
    seed: int = 0
    out: Path = Path("study-output")

    def __post_init__(self) -> None:
        if self.tokens < _LEAST_TOKENS or self.tokens % BLOCK:
            raise ValueError(
                f"kvarn study: tokens must be a multiple of {BLOCK} and at least "
                f"{_LEAST_TOKENS}, got {self.tokens}"
            )
        for name in ("segments", "prompts", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"kvarn study: {name} must be at least 1, got {getattr(self, name)}"
                )


def run(options: Options) -> int:
    """Runs what is not yet in the output folder, prints the tables, draws figures and report."""
    from kvarn.studies import figures, report

    console = Console()
    with _progress.progress(console) as progress:
        loading = progress.add_task("Loading the model", total=1)
        loaded = _load(options)
        progress.update(loading, advance=1, description=f"Loading {loaded.name}")
        study = _Study(options, loaded, progress)
        study.predictions()
        study.attention()
        study.generation()
        study.pictures()
        study.synthetic()
        drawing = progress.add_task("Drawing", total=1)
        parts = results.load(options.out / "results")
        results.write(options.out / "study.json", parts)
        drawn = figures.draw(parts, options.out / "figures")
        report.write(parts, drawn, options.out / "report.html")
        progress.advance(drawing)
    for table in summary.tables(parts):
        table.print()
    console.print(f"Written to {options.out}: report.html, figures, study.json", soft_wrap=True)
    return 0


class _Study:
    def __init__(self, options: Options, loaded: LoadedModel, progress: Progress) -> None:
        self._options, self._loaded, self._progress = options, loaded, progress
        own = loaded.model.dtype
        self._dtype = torch.float16 if own == torch.float32 else own
        self._cases = cases(loaded.head_dim, options.suite)
        self._segments, self._prompts = self._read_texts()
        settings = {
            "model": loaded.name,
            "dtype": str(own).removeprefix("torch."),
            "tokens": options.tokens,
            "segments": list(self._segments),
            "prompts": options.prompts,
            "steps": options.steps,
            "seed": options.seed,
            "first": FIRST,
            "block": BLOCK,
        }
        shape = {
            "layers": loaded.num_layers,
            "heads": int(loaded.text_config.num_attention_heads),
            "kv_heads": loaded.num_kv_heads,
            "head_dim": loaded.head_dim,
        }
        facts = {**summary.facts(loaded.model.device), **shape}
        self._results = Results(options.out / "results", settings, facts)

    # ----------------------------------------------------------------------------------------------
    # Parts

    def predictions(self) -> None:
        """KL, agreement and perplexity of every cache, segment after segment."""
        work = len(self._segments) * len(self._cases) * self._options.tokens
        with self._task("Reading text", work) as advance:
            for name, tokens in self._segments.items():
                missing = [c for c in self._cases if name not in self._done(c)]
                advance((len(self._cases) - len(missing)) * self._options.tokens)
                if not missing:
                    continue
                exact = self._exact_cache()
                log_p = divergence.exact_predictions(self._loaded.model, tokens, exact, tile=GROUP)
                for case in missing:
                    trace = divergence.against(
                        self._loaded.model,
                        tokens,
                        log_p,
                        self._cache(case, exact),
                        first_chunk=case.sinks + GROUP,
                        tile=GROUP,
                        progress=advance,
                    )
                    blocks = results.blocks_of(trace)
                    part = {
                        "name": case.name,
                        "family": case.family,
                        "bits": case.bits,
                        "bits_at": {n: case.bits_at(n) for n in (1024, 8192, 32768)},
                        "sinks": case.sinks,
                        "recent_blocks": case.recent_blocks,
                        "prefill": case.prefill,
                        "segments": {**self._done(case), name: blocks},
                    }
                    self._results.put(f"case-{case.slug}", part)

    def attention(self) -> None:
        """Errors of attention outputs: means of each layer and query head, for each segment."""
        chosen = [c for c in self._cases if _only_encodes(c)]
        self._by_segment("attention", chosen, "Attention of each layer", self._attention_of)

    def _attention_of(self, tokens: Tensor, chosen: Sequence[Case]) -> dict[str, Any]:
        layers = attention_error.capture(self._loaded.model, tokens, self._exact_cache())
        found = {}
        for case in chosen:
            assert case.encoder is not None
            error = attention_error.output_errors(layers, case.encoder, sinks=SINKS, group=GROUP)
            by_head = [[float(f"{x:.3g}") for x in row] for row in error.mean(2).tolist()]
            by_block = [float(f"{x:.4g}") for x in error.unflatten(2, (-1, 32)).mean((0, 1, 3))]
            found[case.name] = {"heads": by_head, "blocks": by_block}
        return found

    def _by_segment(
        self,
        part_name: str,
        chosen: Sequence[Case],
        title: str,
        measure: Callable[[Tensor, Sequence[Case]], dict[str, Any]],
    ) -> None:
        part = self._results.get(part_name) or {}
        with self._task(title, len(self._segments)) as advance:
            for name, tokens in self._segments.items():
                if name not in part:
                    part[name] = measure(tokens, chosen)
                    self._results.put(part_name, part)
                advance(1)

    def generation(self) -> None:
        """Greedy generation: the step at which each prompt's text first differs."""
        dim = self._loaded.head_dim
        recent = ours("k4v2", dim, "unbiased")
        chosen = [
            floor(),
            replace(recent, name=f"{recent.name}, 1 recent block", recent_blocks=1),
            recent,
            ours("k4v2", dim, "minmax"),
            peer("naive", "k4v2", dim),
            ours("k2v2", dim, "unbiased"),
            ours("k2v2", dim, "minmax"),
        ]
        part = self._results.get("generation") or {"steps": self._options.steps, "cases": {}}
        steps, work = self._options.steps, self._prompts.shape[1] + self._options.steps - 1
        missing = [c for c in chosen if c.name not in part["cases"]]
        with self._task("Writing", (1 + len(chosen)) * work) as advance:
            advance((len(chosen) - len(missing) + (not missing)) * work)
            if not missing:
                return
            model, prompts = self._loaded.model, self._prompts
            exact = free_running.greedy(
                model, prompts, self._exact_cache(), steps, tile=GROUP, progress=advance
            )
            for case in missing:
                written = free_running.greedy(
                    model, prompts, self._cache(case, None), steps, tile=GROUP, progress=advance
                )
                part["cases"][case.name] = {
                    "first": free_running.first_differences(exact, written),
                    "same": (exact == written).float().mean(1).tolist(),
                }
                self._results.put("generation", part)

    def pictures(self) -> None:
        """Magnitudes and codes of a real key tile and value tile."""
        if self._results.get("tiles") is None:
            with self._task("Tiles", 1) as advance:
                tokens = next(iter(self._segments.values()))
                cache = self._exact_cache()
                divergence.exact_predictions(self._loaded.model, tokens, cache, tile=GROUP)
                keys, values = ([getattr(x, n)[0].float().cpu() for x in cache.layers]
                                for n in ("keys", "values"))  # fmt: skip
                self._results.put("tiles", tiles.describe(keys, values, FIRST - GROUP, GROUP))
                advance(1)

    def synthetic(self) -> None:
        """Encoders on made-up tiles."""
        if self._results.get("synthetic") is None:
            with self._task("Made-up tiles, head dimension 128", 1) as advance:
                self._results.put("synthetic", synthetic.measure(self._options.seed))
                advance(1)

    # ----------------------------------------------------------------------------------------------

    def _read_texts(self) -> tuple[dict[str, Tensor], Tensor]:
        """Segments by name, and prompts int64 [prompts, 3 tiles] from the ends of the texts."""
        options = self._options
        if options.text is not None:
            found = {"text": options.text.read_text(encoding="utf-8")}
        else:
            vim = texts.vim_manual()
            found = {"python": texts.python_reference(), **({"vim": vim} if vim else {})}
        segments: dict[str, Tensor] = {}
        prompts: list[Tensor] = []
        length = 3 * GROUP
        for name, text in found.items():
            cut = self._loaded.segments(text, options.tokens, options.segments)
            segments |= {f"{name} {i}": tokens for i, tokens in enumerate(cut)}
            ids = self._loaded.encode(text)
            wanted = min(-(-options.prompts // len(found)), len(ids) // length)
            prompts += list(ids[len(ids) - wanted * length :].split(length))
        # Texts take turns: the first segment of each comes before the second of any.
        ordered = dict(sorted(segments.items(), key=lambda item: item[0].split()[1]))
        return ordered, torch.stack(prompts[: options.prompts])

    def _exact_cache(self) -> DynamicCache:
        return DynamicCache(config=self._loaded.model.config)

    def _cache(self, case: Case, exact: DynamicCache | None) -> SimulatedCache:
        source = None
        if case.prefill and exact is not None:
            source = [(layer.keys, layer.values) for layer in exact.layers]
        return SimulatedCache(
            self._loaded.num_layers,
            case.encoder,
            group=GROUP,
            sinks=case.sinks,
            recent_blocks=case.recent_blocks,
            dtype=self._dtype,
            source=source,
        )

    def _done(self, case: Case) -> dict[str, Any]:
        part = self._results.get(f"case-{case.slug}")
        return part["segments"] if part else {}

    @contextlib.contextmanager
    def _task(self, title: str, total: int) -> Any:
        task = self._progress.add_task(title, total=total)
        yield lambda done: self._progress.advance(task, done)


def _only_encodes(case: Case) -> bool:
    """Whether it stands for its encoder: plain cases, not variants of steps, rounds or window."""
    plain = case.sinks == SINKS and not case.recent_blocks and not case.prefill
    return (
        case.encoder is not None and plain and case.family != "steps" and " round" not in case.name
    )


def _load(options: Options) -> LoadedModel:
    """In fp32 on the CPU; on a GPU in fp16, or bf16 if that is the model's own type."""
    transformers.logging.set_verbosity_error()
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if device == "cpu" else torch.float16
    if device != "cpu" and options.model is not None and options.model.is_dir():
        config = transformers.AutoConfig.from_pretrained(options.model, local_files_only=True)
        dtype = torch.bfloat16 if config.get_text_config().dtype == torch.bfloat16 else dtype
    with contextlib.redirect_stderr(io.StringIO()):  # progress bars under our own
        return models.load_model(options.model, dtype=dtype, device=device)
