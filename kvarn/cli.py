"""The command line: ``python -m kvarn info | capacity | demo | study | bench``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from kvarn import capacity as capacity_module
from kvarn import info as info_module
from kvarn import scaling
from kvarn._terminal import Table, binary_bytes
from kvarn.capacity import Capacity, ModelShape
from kvarn.format import Format

_DEMO_MODULES = ("transformers", "accelerate", "gguf", "matplotlib", "rich")


class UserError(Exception):
    """Something that whoever typed the command can put right."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, 1 (a check failed), 2 (a bad argument)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["bench"]:  # its options are the harness's own
        return _guarded(bench, arguments[1:])
    parsed = _parser().parse_args(arguments)
    return _guarded(parsed.command, parsed)


def _guarded(command, *arguments) -> int:  # type: ignore[no-untyped-def]
    try:
        status = int(command(*arguments))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as in `... | head`; nor can Python flush at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (UserError, ValueError, OSError) as error:
        print(f"kvarn: {error}", file=sys.stderr)
        return 2


# --------------------------------------------------------------------------------------------------
# info


def info(args: argparse.Namespace) -> int:
    """Versions, devices, what is missing, and a self-check of every operator on every device."""
    checks = [check for device in info_module.devices() for check in info_module.self_check(device)]
    wrong = [check for check in checks if check.state in ("wrong", "failed")]
    if args.json:
        print(json.dumps(info_module.as_dict(checks), indent=2))
        return 1 if wrong else 0

    Table("kvarn", ("", ""), list(info_module.facts().items()), left=(0, 1)).print()
    for reason in info_module.missing():
        print(f"Missing: {reason}.")
    for module in _missing_modules(_DEMO_MODULES):
        print(
            f"Missing: the package {module}, for `python -m kvarn demo` (pip install kvarn[demo])."
        )
    print()

    devices = list(dict.fromkeys(check.device for check in checks))
    cells = {(check.op, check.device): _cell(check) for check in checks}
    ops = list(dict.fromkeys(check.op for check in checks))
    Table(
        "Self-check: each operator against kvarn.reference",
        ("operator", *devices),
        [(op, *(cells[op, device] for device in devices)) for op in ops],
        left=range(1 + len(devices)),
    ).print()
    if wrong:
        lines = (f"{check.op} on {check.device}: {check.detail}" for check in wrong)
        print(f"{len(wrong)} of {len(checks)} checks failed: " + "\n".join(lines))
        return 1
    print(f"All {sum(check.state == 'ok' for check in checks)} checks passed.")
    return 0


def _cell(check: info_module.Check) -> str:
    return {"failed": "failed", "absent": f"- ({check.detail})"}.get(
        check.state, f"{check.state} ({check.detail})"
    )


def _missing_modules(names: Sequence[str]) -> list[str]:
    return [name for name in names if importlib.util.find_spec(name) is None]


# --------------------------------------------------------------------------------------------------
# capacity


def capacity(args: argparse.Namespace) -> int:
    """How many tokens and sequences fit into a memory, in 16 and 8 bits and packed.

    With --gpu also how long a decode step takes there, by a model of bytes and bandwidth.
    """
    for option in ("batch", "tp", "weights", "weight_bits", "results"):
        if getattr(args, option) is not None and not args.gpu:
            raise UserError(f"--{option.replace('_', '-')} is of the decode step: it needs --gpu")
    args.batch, args.tp, args.weight_bits = (
        default if value is None else value
        for value, default in ((args.batch, 32), (args.tp, 1), (args.weight_bits, 16))
    )
    shape = _shape(args)
    steps = _steps(args, shape) if args.gpu else []
    memory = capacity_module.parse_bytes(args.memory)
    rows = capacity_module.compare(
        shape,
        memory=memory,
        context=args.context,
        formats=args.formats,
        sink_blocks=args.sink_blocks,
        recent_blocks=args.recent_blocks,
    )
    if args.json:
        report = capacity_module.to_json(shape, rows, memory=memory, context=args.context)
        if args.gpu:
            report["decode_step"] = scaling.to_json(
                steps,
                scaling.GPUS[args.gpu],
                batch=args.batch,
                context=args.context,
                tensor_parallel=args.tp,
            )
        print(json.dumps(report, indent=2))
        return 0
    for table in _capacity_tables(shape, rows, memory, args.context):
        table.print()
    if args.gpu:
        for table in _step_tables(steps, args):
            table.print()
    return 0


def _shape(args: argparse.Namespace) -> ModelShape:
    by_hand = {"layers": args.layers, "kv_heads": args.kv_heads, "head_dim": args.head_dim}
    given = {name: value for name, value in by_hand.items() if value is not None}
    if args.config is None:
        if len(given) < len(by_hand):
            raise UserError(
                "capacity needs a model: --config with a folder or config.json, or all of "
                "--layers, --kv-heads and --head-dim"
            )
        return ModelShape(**given)
    shape = ModelShape.from_config(args.config)
    return ModelShape(**{**vars(shape), **given})


def _capacity_tables(
    shape: ModelShape, rows: Sequence[Capacity], memory: int, context: int
) -> list[Table]:
    default = Format.presets()[0]
    strong = [i for i, row in enumerate(rows) if row.format == default]
    heads = shape.layers * shape.kv_heads
    tokens = Table(
        f"A cache of {binary_bytes(memory)}: {shape.layers} layers x {shape.kv_heads} KV heads x "
        f"{shape.head_dim} channels",
        ("format", "bytes/token", "per head", "smaller", "longest sequence"),
        [
            (
                row.format,
                f"{row.bytes_per_token:,.0f}",
                f"{row.bytes_per_token / heads:,.0f}",
                f"{row.ratio:.2f}x",
                f"{row.longest_sequence:,}",
            )
            for row in rows
        ],
        strong=strong,
    )
    sequences = Table(
        f"Sequences of {context:,} tokens in it",
        ("format", "size", "staging", "smaller", "sequences", "tokens"),
        [
            (
                row.format,
                binary_bytes(row.sequence_bytes),
                binary_bytes(row.staging_bytes) if row.staging_bytes else "-",
                f"{row.effective_ratio:.2f}x",
                f"{row.sequences:,}",
                f"{row.tokens:,}",
            )
            for row in rows
        ],
        caption="Size includes staging: the blocks a sequence keeps in 16 bits\n"
        "(sinks, newest full ones, open one).",
        strong=strong,
    )
    return [tokens, sequences]


def _steps(args: argparse.Namespace, shape: ModelShape) -> list[scaling.Step]:
    if args.results is not None and not args.results.is_dir():
        raise UserError(f"--results must be a folder, got {args.results}")
    if args.weights is not None:
        weights = capacity_module.parse_bytes(args.weights)
        decoder = scaling.Decoder.from_bytes(shape, weights, weight_bits=args.weight_bits)
    elif args.config is not None:
        decoder = scaling.Decoder.from_config(args.config, weight_bits=args.weight_bits)
    else:
        raise UserError("--gpu needs the weights: --config, or --weights with their bytes")
    return scaling.predict(
        decoder,
        scaling.GPUS[args.gpu],
        scaling.measured_rates(args.results or scaling.default_results()),
        formats=args.formats,
        sink_blocks=args.sink_blocks,
        recent_blocks=args.recent_blocks,
        batch=args.batch,
        context=args.context,
        tensor_parallel=args.tp,
    )


def _step_tables(steps: Sequence[scaling.Step], args: argparse.Namespace) -> list[Table]:
    strong = [i for i, step in enumerate(steps) if step.format == Format.presets()[0]]
    gpus = scaling.GPUS[args.gpu].name
    if args.tp > 1:
        gpus = f"{args.tp} x {gpus}"
    assumed = scaling.ASSUMPTIONS
    sources: dict[str, list[str]] = {}
    for step in steps:
        sources.setdefault(step.attention, []).append(step.format)
    notes = [
        f"Attention at {rate}" + (f": {', '.join(names)}." if len(sources) > 1 else ".")
        for rate, names in sources.items()
    ]
    times = Table(
        f"A decode step on {gpus}, batch {args.batch}, context {args.context:,}: milliseconds",
        ("format", "weights", "cache", "launch", "step", "tokens/s", "largest"),
        [
            (
                step.format,
                *(
                    f"{us / 1e3:.2f}"
                    for us in (step.weights_us, step.cache_us, step.launch_us, step.step_us)
                ),
                f"{step.tokens_per_second:,.0f}",
                step.largest,
            )
            for step in steps
        ],
        caption="\n".join(
            textwrap.fill(line, 80, subsequent_indent="  ")
            for line in (
                "A model, not a measurement (kvarn/scaling.py).",
                *notes,
                f"Assumed: weights at {assumed.weight_share:.0%} of the bandwidth, "
                f"{assumed.layer_us:g} us a layer beside attention, {assumed.allreduce_us:g} us "
                "an all-reduce.",
            )
        ),
        left=(0, 6),
        strong=strong,
    )
    batches = Table(
        f"What the cache decides on {gpus}",
        ("format", "cache largest from", "sequences that fit", "tokens/s of them"),
        [
            (
                step.format,
                f"{step.cache_largest_from:,} tokens",
                f"{step.fits:,}",
                f"{step.fits_tokens_per_second:,.0f}" if step.fits else "-",
            )
            for step in steps
        ],
        caption=f"Largest: longer than weights and launch together, at batch {args.batch}.\n"
        f"Weights and cache may take {assumed.memory_share:.0%} of the memory.",
        strong=strong,
    )
    return [times, batches]


# --------------------------------------------------------------------------------------------------
# demo, study, bench


def demo(args: argparse.Namespace) -> int:
    """A real language model with a 16-bit cache and with packed ones."""
    _require_demo_modules("demo")
    from kvarn.demo import run

    return run(
        model=args.model,
        text=args.text,
        tokens=args.tokens,
        formats=args.formats,
        out=args.out,
        memory=capacity_module.parse_bytes(args.memory),
        quick=args.quick,
    )


def study(args: argparse.Namespace) -> int:
    """Measure what each cache does to a model's predictions, with intervals, figures, a report."""
    _require_demo_modules("study")
    from kvarn.studies.study import Options, run

    given = {name: getattr(args, name) for name in Options.__dataclass_fields__}
    return run(Options(**given))


def _require_demo_modules(command: str) -> None:
    if missing := _missing_modules(_DEMO_MODULES):
        raise UserError(
            f"the {command} needs {', '.join(missing)}: pip install 'kvarn[demo]' (or `make demo`)"
        )


def bench(argv: Sequence[str]) -> int:
    """Hands its arguments to the benchmark harness, which a checkout has beside the package."""
    if importlib.util.find_spec("bench.__main__") is None:
        raise UserError(
            "the benchmarks are not part of the installed package: run `python -m kvarn bench` in "
            "a checkout of the repository"
        )
    return int(importlib.import_module("bench.__main__").main(list(argv)) or 0)


# --------------------------------------------------------------------------------------------------
# arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvarn", description="A KV cache of 2 to 8 bits a value."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("info", help=_first_line(info), description=info.__doc__)
    command.add_argument("--json", action="store_true", help="print JSON instead of tables")
    command.set_defaults(command=info)

    command = commands.add_parser(
        "capacity", help=_first_line(capacity), description=capacity.__doc__
    )
    command.add_argument("--config", type=Path, help="a Hugging Face model folder or config.json")
    command.add_argument("--layers", type=int, help="attention layers (overrides --config)")
    command.add_argument("--kv-heads", type=int, help="key/value heads of a layer, on one device")
    command.add_argument("--head-dim", type=int, help="channels of a head")
    command.add_argument(
        "--memory", default="16GiB", help="of the cache alone (default: %(default)s)"
    )
    command.add_argument(
        "--context", type=int, default=32768, help="tokens of a sequence (default: %(default)s)"
    )
    command.add_argument(
        "--formats", nargs="+", metavar="NAME", help="kvarn formats (default: all presets)"
    )
    command.add_argument(
        "--sink-blocks", type=int, default=1,
        help="first blocks of a sequence in 16 bits (default: %(default)s)",
    )  # fmt: skip
    command.add_argument(
        "--recent-blocks", type=int, default=1,
        help="newest full blocks in 16 bits (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--gpu", choices=scaling.GPUS, help="also model a decode step on this GPU")
    command.add_argument("--batch", type=int, help="sequences of that step (default: 32)")
    command.add_argument("--tp", type=int, help="GPUs that share heads and weights (default: 1)")
    command.add_argument("--weights", help="bytes of the weights, where --config does not tell")
    command.add_argument("--weight-bits", type=int, help="of a weight (default: 16)")
    command.add_argument(
        "--results", type=Path, metavar="FOLDER",
        help="of recorded benchmarks of a GPU, for the rate of attention (default: the "
        "checkout's)",
    )  # fmt: skip
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
    command.set_defaults(command=capacity)

    command = commands.add_parser("demo", help=_first_line(demo), description=demo.__doc__)
    command.add_argument(
        "--model",
        type=Path,
        help="a local Hugging Face folder or GGUF file (default: SmolLM2-135M)",
    )
    command.add_argument("--text", type=Path, help="a text to read (default: Python's reference)")
    command.add_argument("--tokens", type=int, help="of the text to read (default: 1024)")
    command.add_argument("--formats", nargs="+", metavar="NAME", help="kvarn formats to compare")
    command.add_argument(
        "--memory", default="1GiB", help="for 'tokens that fit' (default: %(default)s)"
    )
    command.add_argument(
        "--out", type=Path, default=Path("demo-output"), help="for figures (default: %(default)s)"
    )
    command.add_argument(
        "--quick", action="store_true", help="less than a minute: shorter, fewer rows"
    )
    command.set_defaults(command=demo)

    command = commands.add_parser("study", help=_first_line(study), description=study.__doc__)
    command.add_argument(
        "--model",
        type=Path,
        help="a local Hugging Face folder or GGUF file (default: SmolLM2-135M)",
    )
    command.add_argument(
        "--text", type=Path, help="a text to read (default: Python's reference, the Vim manual)"
    )
    for name, default, meaning in (
        ("tokens", 1024, "of a segment of text"),
        ("segments", 2, "of each text"),
        ("prompts", 8, "of the generation"),
        ("steps", 64, "tokens that the generation writes"),
        ("seed", 0, "of the bootstrap, made-up tiles and random rotations"),
    ):
        command.add_argument(
            f"--{name}", type=int, default=default, help=f"{meaning} (default: %(default)s)"
        )
    command.add_argument(
        "--suite", choices=("quick", "standard", "full"), default="standard",
        help="how many caches: 11, 52 or 74 (default: %(default)s)",
    )  # fmt: skip
    command.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: a GPU if there is one)")
    command.add_argument(
        "--out", type=Path, default=Path("study-output"),
        help="for results, figures and report; what is there already is not run again "
        "(default: %(default)s)",
    )  # fmt: skip
    command.set_defaults(command=study)

    commands.add_parser(
        "bench", help="Time the operators (arguments: python -m kvarn bench --help)", add_help=False
    )
    return parser


def _first_line(command: object) -> str:
    return (command.__doc__ or "").splitlines()[0]
