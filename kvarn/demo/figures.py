"""The demo's pictures, as PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from kvarn import reference
from kvarn.demo.configurations import Configuration
from kvarn.studies.divergence import Trace
from kvarn.studies.style import COLORS, COMPARATOR_COLOR, STYLE

_WINDOW = 64  # tokens averaged in the curves
_NOISE = 1e-6  # of fp32 arithmetic: smaller divergences are none


def rotation(path: Path, keys: Sequence[Tensor], first_token: int, group: int = 128) -> None:
    """Magnitudes in a real key tile before and after the rotation, and after the normalization.

    Args:
        path: the PNG file.
        keys: of each layer, [Hkv, tokens, D]; the tile with the largest outlier channel is shown.
        first_token: of the tile.
    """
    tiles = [layer[:, first_token : first_token + group].float().cpu() for layer in keys]
    layer, head = max(
        ((i, h) for i, tile in enumerate(tiles) for h in range(tile.shape[0])),
        key=lambda at: _outlier(tiles[at[0]][at[1]]),
    )
    tile = tiles[layer][head]
    rotated = reference.hadamard_transform(tile)
    balanced, _, _ = reference.variance_normalize(rotated.T)
    panels = {
        "as the model made it": tile.T,
        "rotated": rotated.T,
        "rotated and normalized": balanced,
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 5.4), layout="constrained")
        grid = figure.subplots(
            2, 3, sharey="row", sharex="row", gridspec_kw={"height_ratios": [3, 2]}
        )
        figure.suptitle(
            f"Keys of layer {layer}, KV head {head}, tokens {first_token} to "
            f"{first_token + group - 1}",
            x=0.01, ha="left", fontsize=12,
        )  # fmt: skip
        top = float(tile.abs().max())
        for column, (title, x) in enumerate(panels.items()):
            # The normalized tile has another unit: its own colours, the same meaning of white.
            limit = top if column < 2 else float(x.abs().max())
            image = grid[0, column].imshow(
                x.abs().numpy(),
                aspect="auto",
                cmap="magma_r",
                vmin=0,
                vmax=limit,
                interpolation="nearest",
            )
            grid[0, column].set(title=title, xlabel="token of the tile")
            figure.colorbar(image, ax=grid[0, column], label="magnitude", fraction=0.06)
            size = x.square().mean(1).sqrt()
            relative = (size / size.mean()).numpy()
            grid[1, column].bar(range(len(x)), relative, color=COLORS[0])
            grid[1, column].axhline(1, color="black", linewidth=0.8)
            grid[1, column].set(
                xlabel="channel",
                title=f"largest channel {relative.max():.1f}x the mean",
            )
        grid[0, 0].set_ylabel("channel")
        grid[1, 0].set_ylabel("rms / mean of them")
        figure.savefig(path)


def _outlier(tile: Tensor) -> float:
    size = tile.square().mean(0).sqrt()
    return float(size.max() / size.mean())


def error_by_position(
    path: Path, traces: Mapping[Configuration, Trace], *, group: int, first: int
) -> None:
    """KL divergence from the exact cache along the text, one curve a configuration; the means in
    the legend are from token ``first`` on."""
    colors, dashes = iter(COLORS * 2), iter(("--", ":", "-.") * 4)
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 5), layout="constrained")
        axes = figure.subplots()
        for configuration, trace in traces.items():
            y = _windowed(trace.kl)
            x = (np.arange(len(y)) + 0.5) * _WINDOW
            y[y < _NOISE] = np.nan  # nothing packed has been read yet
            axes.plot(
                x,
                y,
                color=COMPARATOR_COLOR if configuration.comparator else next(colors),
                linestyle=next(dashes) if configuration.comparator else "-",
                linewidth=1.8,
                marker=".",
                label=f"{configuration.name}  (mean {trace.mean_kl(first):.4f})",
            )
        tokens = len(next(iter(traces.values())).kl)
        for boundary in range(group, tokens + 1, group):
            axes.axvline(boundary, color="0.9", linewidth=0.8, zorder=0)
        axes.axvspan(group, first, color="0.95", zorder=0)
        axes.text(
            (group + first) / 2,
            0.98,
            "first tiles fill",
            ha="center",
            va="top",
            color="0.4",
            transform=axes.get_xaxis_transform(),
        )
        axes.set(
            yscale="log",
            xlim=(group, tokens),
            xlabel=f"position in the text (lines: tiles of {group} tokens)",
            ylabel=f"KL divergence, mean of {_WINDOW} tokens (nats)",
            title="How far the next-token distribution moves from that with a 16-bit cache",
        )
        axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), ncols=2)
        figure.savefig(path)


def _windowed(x: Tensor) -> NDArray[np.float32]:
    whole = len(x) // _WINDOW * _WINDOW
    windows: NDArray[np.float32] = x[:whole].view(-1, _WINDOW).mean(1).numpy()
    return windows


def memory(path: Path, configurations: Sequence[Configuration], budget: int, label: str) -> None:
    """Bytes per token and the longest sequence that a memory holds, by format."""
    names = [c.name for c in configurations]
    token = [c.bytes_per_token for c in configurations]
    longest = [c.longest_sequence(budget) for c in configurations]
    colors = [COMPARATOR_COLOR if c.comparator else COLORS[0] for c in configurations]
    colors[0] = "0.3"
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 0.8 + 0.45 * len(names)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.bar_label(
            left.barh(names, token, color=colors),
            [f"{token[0]:,.0f}", *(f"{x:,.0f}  ({token[0] / x:.2f}x smaller)" for x in token[1:])],
            padding=4,
        )
        right.bar_label(
            right.barh(names, longest, color=colors),
            [f"{longest[0]:,}", *(f"{x:,}  ({x / longest[0]:.2f}x)" for x in longest[1:])],
            padding=4,
        )
        left.set(title="bytes per token", xlim=(0, 1.45 * max(token)), xticks=[])
        right.set(
            title=f"tokens of one sequence in {label}", xlim=(0, 1.45 * max(longest)), xticks=[]
        )
        for axes in (left, right):
            axes.spines["bottom"].set_visible(False)
        left.invert_yaxis()
        figure.savefig(path)


def keys_of(cache: object) -> list[Tensor]:
    """Keys [Hkv, tokens, D] of each layer of a transformers DynamicCache with one sequence."""
    return [layer.keys[0] for layer in cache.layers]  # type: ignore[attr-defined]
