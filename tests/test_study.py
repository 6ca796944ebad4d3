"""`python -m kvarn study` on a tiny model, and its parts on made-up data."""

from __future__ import annotations

import base64
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytest.importorskip("matplotlib")
pytest.importorskip("rich")

from tiny_model import WORDS, save
from transformers import DynamicCache, LlamaForCausalLM

from kvarn import Format, capacity, cli
from kvarn.studies import (
    attention_error,
    cases,
    divergence,
    document,
    encoders,
    free_running,
    intervals,
    results,
    study,
    summary,
)
from kvarn.studies.simulated_cache import SimulatedCache
from kvarn.studies.steps import Steps

K4V2 = Format("kvarn_k4v2_g128", head_dim=64)


# --------------------------------------------------------------------------------------------------
# The whole command


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished quick study: the arguments of the command."""
    folder = tmp_path_factory.mktemp("study")
    text = folder / "text.txt"
    text.write_text(WORDS)
    arguments = ["study", "--model", str(save(folder / "model")), "--text", str(text)]
    arguments += ["--tokens", "640", "--segments", "2", "--suite", "quick", "--prompts", "3"]
    arguments += ["--steps", "5", "--device", "cpu", "--out", str(folder / "out")]
    assert cli.main(arguments) == 0
    return arguments


@pytest.fixture(scope="module")
def out(done):
    return study.Path(done[-1])


def test_study_goes_on_where_it_was(done, out, monkeypatch, capsys):
    """Only what is missing is run again, and it comes out the same. What is printed has an interval
    with every measurement."""
    missing = out / "results" / "case-k4v2-minmax.json"
    before = missing.read_text()
    missing.unlink()
    run, seen = divergence.against, []

    def counted(model, tokens, *rest, **options):
        seen.append(len(tokens))
        return run(model, tokens, *rest, **options)

    monkeypatch.setattr(divergence, "against", counted)
    monkeypatch.setattr(attention_error, "capture", None)
    monkeypatch.setattr(free_running, "greedy", None)
    assert cli.main(done) == 0
    assert seen == [640, 640]
    assert missing.read_text() == before

    printed = capsys.readouterr().out
    tables = summary.tables(results.load(out / "results"))
    assert len(tables) == 8
    for table in tables:
        assert table.plain() in printed
        for row in table.rows:
            measured = [
                c for c in row[1:] if re.fullmatch(r"[-+]?\d[\d.]* \[.*\]|\d+: .* \[.*\]", c)
            ]
            assert measured
    assert [row[0] for row in tables[0].rows if "naive" in row[0]] == ["k4v2 naive"]
    assert len(tables[0].rows) == 11


def test_study_refuses_results_of_other_settings(done, capsys):
    arguments = [*done, "--seed", "1"]
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert "kvarn: out must be a folder for this study" in printed
    assert "(seed differ)" in printed


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (["--tokens", "512"], "tokens must be a multiple of 64 and at least 640, got 512"),
        (["--prompts", "0"], "prompts must be at least 1, got 0"),
        (["--model", "nowhere"], "model must be a local folder or GGUF file, got nowhere"),
    ],
)
def test_wrong_options_are_explained(option, message, capsys, tmp_path):
    assert cli.main(["study", "--out", str(tmp_path), *option]) == 2
    assert message in capsys.readouterr().err


def test_results_of_the_parts(out):
    parts = json.loads((out / "study.json").read_text())
    assert parts == results.load(out / "results")
    known = summary.case_parts(parts)
    assert list(parts["settings"]["settings"]["segments"]) == ["text 0", "text 1"]
    for part in known.values():
        for segment in part["segments"].values():
            assert len(segment["kl"]) == len(segment["top1"]) == len(segment["nll"]) == 10
    # A cache whose errors are real, and one that has none.
    assert max(known["16-bit cache"]["segments"]["text 0"]["kl"]) < 1e-6
    assert min(known["k2v2 minmax"]["segments"]["text 0"]["kl"][4:]) > 1e-6
    # Nothing packed is read before the sinks and a tile are full (and a recent tile, if kept).
    assert max(known["k2v2 minmax"]["segments"]["text 0"]["kl"][:4]) < 1e-6
    assert max(known["k4v2 unbiased, 1 recent block"]["segments"]["text 0"]["kl"][:6]) < 1e-6
    attention = parts["attention"]["text 0"]["k4v2 unbiased"]
    assert (len(attention["heads"]), len(attention["heads"][0])) == (2, 4)
    assert set(parts["generation"]["cases"]) >= {"16-bit cache", "k4v2 unbiased"}
    assert sum(parts["tiles"]["key"]["codes"]["unbiased"]) == pytest.approx(1, abs=1e-3)


def test_figures(out):
    names = ("pareto", "position", "choices", "channels", "codes", "attention")
    for name in names:
        assert (out / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (out / "figures" / f"{name}.svg").read_text()


# --------------------------------------------------------------------------------------------------
# The report


class _Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.ids, self.links, self.images, self.rows = [], set(), [], [], 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.tags.append(tag)
        self.rows += tag == "tr"
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found[k] for k in ("href", "src") if k in found]
        self.images += [found] if tag == "img" else []


def test_report_is_one_file(out):
    text = (out / "report.html").read_text()
    page = _Page(text)
    assert "@@" not in text
    assert all(link.startswith(("#", "data:")) for link in page.links)
    assert {link[1:] for link in page.links if link.startswith("#")} <= page.ids
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|<iframe", text)
    assert len(page.images) == 6
    for image in page.images:
        assert image["alt"]
        svg = base64.b64decode(image["src"].split("base64,")[1]).decode()
        assert svg.startswith("<svg")
        assert not re.search(r'(href|src)="https?:', svg)
    assert page.rows > 60


ACCOUNTS = [
    {"layers": 32, "heads": 8, "dim": 128, "context": 32768, "k": 4, "v": 2, "group": 128,
     "recent": 1, "memory": 64 * 2**30},
    {"layers": 30, "heads": 3, "dim": 64, "context": 1000, "k": 2, "v": 3, "group": 64,
     "recent": 0, "memory": 2**30},
    {"layers": 80, "heads": 1, "dim": 256, "context": 200, "k": 8, "v": 8, "group": 128,
     "recent": 4, "memory": 2**26},
]  # fmt: skip


def check_account(found, case):
    """The page's numbers against `kvarn.capacity`."""
    fmt = Format(f"kvarn_k{case['k']}v{case['v']}_g{case['group']}", head_dim=case["dim"])
    shape = capacity.ModelShape(case["layers"], case["heads"], case["dim"])
    kwargs = {"memory": case["memory"], "context": case["context"]}
    packed = capacity.packed_capacity(shape, fmt, recent_blocks=case["recent"], **kwargs)
    plain = capacity.plain_capacity(shape, "", 2, **kwargs)
    assert found["record"] == fmt.record_bytes
    assert found["token"] == packed.bytes_per_token
    assert found["sequence"] == packed.sequence_bytes
    assert found["staging"] == packed.staging_bytes
    assert (found["sequences"], found["longest"]) == (packed.sequences, packed.longest_sequence)
    assert (found["sequences16"], found["longest16"]) == (plain.sequences, plain.longest_sequence)


def inputs(case):
    names = {"k": "kbits", "v": "vbits"}
    return {names.get(name, name): value for name, value in case.items()}


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_memory_account_of_the_report(out):
    script = re.search(r"<script>(.*?)</script>", (out / "report.html").read_text(), re.DOTALL)[1]
    functions = script.split("function settings()")[0].replace("document.getElementById(id)", "0")
    asked = json.dumps([inputs(case) for case in ACCOUNTS])
    program = functions + f"console.log(JSON.stringify({asked}.map(account)));"
    answer = subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True)
    for found, case in zip(json.loads(answer.stdout), ACCOUNTS, strict=True):
        check_account(found, case)


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_report_in_a_browser(out, tmp_path):
    """Sliders move what is shown; no errors, nothing asked of a network."""
    probe = """<script>
      window.onerror = (message) => { document.title = "error: " + message; };
      window.addEventListener("load", () => {
        const shown = () => $("token-bytes").textContent + " " + $("kbits-out").textContent;
        const before = shown();
        $("kbits").value = 0;
        $("kbits").dispatchEvent(new Event("input"));
        const asked = performance.getEntriesByType("resource");
        document.body.dataset.probe = JSON.stringify({
          before, after: shown(), rows: $("parts").rows.length,
          images: [...document.images].filter((image) => image.naturalWidth > 0).length,
          wide: document.documentElement.scrollWidth > window.innerWidth,
          asked: asked.filter((entry) => !entry.name.startsWith("data:")).length,
          accounts: ASKED.map(account),
        });
      });
    </script></body>""".replace("ASKED", json.dumps([inputs(case) for case in ACCOUNTS]))
    page = tmp_path / "page.html"
    page.write_text((out / "report.html").read_text().replace("</body>", probe))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1000,800"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    found = re.search(r'data-probe="([^"]*)"', answer.stdout)
    assert found is not None, answer.stderr[-2000:]
    probe = json.loads(found[1].replace("&quot;", '"'))
    assert "<title>kvarn: accuracy study</title>" in answer.stdout
    assert probe["before"] == "27,648 4"
    bits = Format("kvarn_k2v2_g128", head_dim=128).bytes_per_token * 256
    assert probe["after"] == f"{bits:,.0f} 2"
    assert probe["images"] == 6
    assert not probe["wide"]
    assert (probe["rows"], probe["asked"]) == (8, 0)
    for answer, case in zip(probe["accounts"], ACCOUNTS, strict=True):
        check_account(answer, case)


# --------------------------------------------------------------------------------------------------
# Encoders


def relative_mse(approx, exact):
    return float((approx - exact).square().sum() / exact.square().sum())


@pytest.fixture
def tile():
    return torch.randn(8, 128, 2, 64), torch.randn(8, 128, 2, 64)


def test_lloyd_max_levels():
    """The table of Max (1960): levels and error for a standard normal variable."""
    assert encoders.lloyd_max(2).tolist() == pytest.approx(
        [-1.510, -0.4528, 0.4528, 1.510], abs=1e-3
    )
    x = torch.randn(200_000)
    for bits, error in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):
        levels = encoders.lloyd_max(bits)
        nearest = levels[(x[:, None] - levels).abs().argmin(1)]
        assert float((nearest - x).square().mean()) == pytest.approx(error, rel=0.02)


def test_comparators_on_gaussian_tiles(tile):
    key, value = tile
    error = {
        name: [relative_mse(a, b) for a, b in zip(encoder(key, value), tile, strict=True)]
        for name, encoder in {
            "naive": encoders.naive(4, 2),
            "naive, rotated": encoders.rotated(encoders.naive(4, 2)),
            "KIVI": encoders.kivi_like(4, 2),
            "TurboQuant": encoders.turboquant_like(4, 2),
            "fp8": encoders.fp8,
        }.items()
    }
    assert error["naive"] == pytest.approx([0.0080, 0.199], rel=0.03)
    assert error["naive, rotated"] == pytest.approx(error["naive"], rel=0.03)
    assert error["KIVI"] == pytest.approx([0.0061, 0.153], rel=0.03)
    # In 64 dimensions a direction's coordinates are not quite normal.
    assert error["TurboQuant"] == pytest.approx([0.0093, 0.115], rel=0.05)
    assert error["fp8"] == pytest.approx([0.0007, 0.0007], rel=0.05)


def test_rotation_helps_a_channel_with_outliers(tile):
    key, value = (x.clone() for x in tile)
    key[..., 3] *= 50
    plain, _ = encoders.naive(4, 2)(key, value)
    turned, _ = encoders.rotated(encoders.naive(4, 2))(key, value)
    others = [c for c in range(64) if c != 3]
    assert relative_mse(turned[..., others], key[..., others]) < 0.5 * relative_mse(
        plain[..., others], key[..., others]
    )


def test_kivi_groups(tile):
    """A key's range is that of 32 tokens of its channel, a value's that of 32 of its channels."""
    key, value = (x.clone() for x in tile)
    key[0, 40, 0, 5] = value[0, 40, 0, 5] = 1e3
    before, after = encoders.kivi_like(4, 2)(*tile), encoders.kivi_like(4, 2)(key, value)
    changed = [(a != b).nonzero() for a, b in zip(before, after, strict=True)]
    assert set(map(tuple, changed[0][:, [0, 2, 3]].tolist())) == {(0, 0, 5)}
    assert set(changed[0][:, 1].tolist()) <= set(range(32, 64))
    assert set(map(tuple, changed[1][:, :3].tolist())) == {(0, 40, 0)}
    assert set(changed[1][:, 3].tolist()) <= set(range(32))


def test_fp8_keeps_what_it_can_represent():
    x = torch.tensor([[0.0, 1.0, -1.125, 448.0, 1e6, 2**-9]]).view(1, 1, 1, -1)
    key, value = encoders.fp8(x, -x)
    assert key.flatten().tolist() == [0.0, 1.0, -1.125, 448.0, 448.0, 2**-9]
    assert torch.equal(key, -value)


def test_all_steps_are_the_reference(tile):
    value = tile[1] * torch.rand(64)
    for bits in ("k4v2", "k2v2"):
        fmt = Format(f"kvarn_{bits}_g128", head_dim=64)
        switched = encoders.by_steps(Steps(), fmt)(tile[0], value)
        for a, b in zip(switched, encoders.reference(fmt)(tile[0], value), strict=True):
            assert relative_mse(a, b) < 1e-6


def test_each_step_can_be_left_out(tile):
    key, value = tile[0], tile[1] * torch.rand(64)
    whole = encoders.by_steps(Steps(), K4V2)(key, value)
    for name in Steps.__dataclass_fields__:
        other = encoders.by_steps(Steps(**{name: False}), K4V2)(key, value)
        assert relative_mse(other[1], whole[1]) > 1e-4
        if name != "null_mean":
            assert relative_mse(other[0], whole[0]) > 1e-5
    fmt = Format("kvarn_k2v2_g128", head_dim=64)
    for steps, gain in ((Steps(), 0.0), (Steps(gain=False), -0.109)):
        read, _ = encoders.by_steps(steps, fmt)(*tile)
        measured = float((read * tile[0]).sum() / tile[0].square().sum()) - 1
        assert measured == pytest.approx(gain, abs=0.01)


def test_stored_bits():
    """Codes, scales and zero points; the tokens in 16 bits at a context."""
    known = {case.name: case for case in cases.cases(64, "full")}
    stored = {
        "k4v2 unbiased": 8 * K4V2.record_bytes / (2 * 128 * 64),
        "k4v2 naive": 3 + (2 * 16) / 64,
        "k4v2 KIVI-like": 3 + (2 * 16) / 32,
        "k4v2 TurboQuant-like": 3 + 16 / 64,
        "fp8 e4m3": 8,
        "16-bit cache": 16,
    }
    assert {name: known[name].bits for name in stored} == pytest.approx(stored)
    recent = known["k4v2 unbiased, 1 recent block"]
    # Sinks, recent block and half an open one.
    assert recent.bits_at(8192) == pytest.approx((320 * 16 + 7872 * recent.bits) / 8192)
    assert recent.bits_at(100) == 16
    for suite in ("quick", "standard", "full"):
        slugs = [case.slug for case in cases.cases(128, suite)]
        assert len(set(slugs)) == len(slugs)


# --------------------------------------------------------------------------------------------------
# Measures


def test_exact_prefill_reads_tiles_of_the_exact_cache():
    """Earlier tokens are those of the source, packed, whatever the run itself computed."""
    source = torch.randn(1, 1, 64, 8, dtype=torch.float16).float()
    cache = SimulatedCache(
        1, lambda key, value: (-key, 2 * value), group=16, sinks=16, source=[(source, source)]
    )
    own = torch.randn(1, 1, 64, 8, dtype=torch.float16).float()
    for start in range(0, 64, 16):
        rows = slice(start, start + 16)
        key, value = cache.update(own[:, :, rows], own[:, :, rows], 0)
    assert torch.equal(key[:, :, :16], source[:, :, :16])
    assert torch.equal(key[:, :, 16:48], -source[:, :, 16:48])
    assert torch.equal(value[:, :, 16:48], 2 * source[:, :, 16:48])
    assert torch.equal(key[:, :, 48:], own[:, :, 48:])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("model"))
    return LlamaForCausalLM.from_pretrained(folder).eval()


def test_predictions_do_not_depend_on_the_chunks(model):
    tokens = torch.randint(1, 257, (300,))
    log_p = divergence.exact_predictions(model, tokens, DynamicCache(config=model.config), tile=64)
    for first in (50, 128, 1000):
        steps = []
        trace = divergence.against(
            model, tokens, log_p, DynamicCache(config=model.config), first_chunk=first, tile=100,
            progress=steps.append,
        )  # fmt: skip
        assert sum(steps) == len(trace.kl) == 300
        assert trace.kl.abs().max() < 1e-5
        assert trace.agree.all()
        assert len(trace.nll) == 299


def test_attention_error_attends_as_the_model_does(model):
    tokens, seen = torch.randint(1, 257, (300,)), {}
    projection = model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda _, args: seen.update(out=args[0][0]))
    layers = attention_error.capture(model, tokens, DynamicCache(config=model.config), queries=100)
    handle.remove()
    assert [tuple(layer.query.shape) for layer in layers] == [(4, 100, 64)] * 2
    attended = attention_error._attend(layers[1], layers[1].key, layers[1].value)
    assert torch.allclose(attended.transpose(0, 1).flatten(1), seen["out"], atol=1e-5)

    def same(key, value):
        return key, value

    def lost(key, value):
        return torch.zeros_like(key), torch.zeros_like(value)

    sinks = {"sinks": 64, "group": 64}
    assert attention_error.output_errors(layers, same, **sinks).max() < 1e-5  # fp16
    assert attention_error.output_errors(layers, lost, **sinks).min() > 1e-3
    # Packed are tokens 64 to 191: what comes after the sinks and before the first query at 200.
    shapes = []
    attention_error.output_errors(layers, lambda k, v: (shapes.append(k.shape), (k, v))[1], **sinks)
    assert shapes == [(2, 64, 2, 64)] * 2


def test_greedy_writes_what_generate_writes(model):
    prompts = torch.randint(1, 257, (3, 70))
    written = free_running.greedy(model, prompts, DynamicCache(config=model.config), 6, tile=32)
    expected = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(written, expected[:, 70:])
    other = written.clone()
    other[1, 2] += 1
    other[2, [0, 5]] += 1
    assert free_running.first_differences(written, other) == [6, 2, 0]


def test_intervals_cover_correlated_errors():
    """Errors that neighbouring tokens share: a bootstrap over blocks covers the truth about as
    often as it says, one over single tokens much less."""
    hits = {1: 0, 64: 0}
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(2, 16, generator=generator).repeat_interleave(32, 1)  # runs of 32 tokens
        for block in hits:
            found = intervals.mean(list(x), block=block)
            hits[block] += found.low < 0 < found.high
    assert hits[64] >= 32
    assert hits[1] <= 24


def test_difference_and_mean():
    a, b = [torch.arange(128.0), torch.arange(128.0) + 3], [torch.arange(128.0)] * 2
    shift = intervals.difference(a, b)
    assert (shift.value, shift.low, shift.high) == (1.5, 1.5, 1.5)
    assert intervals.mean(a).value == 65
    assert intervals.mean(a).map(math.sqrt).value == pytest.approx(65**0.5)
    assert intervals.mean([torch.ones(64)]).text(".1f") == "1.0 [1.0, 1.0]"


@pytest.mark.parametrize(
    ("interval", "verdict"),
    [
        ((0.5, 0.4, 0.69), "holds"),
        ((0.69, 0.6, 0.8), "not established"),
        ((0.8, 0.75, 0.9), "does not hold"),
    ],
)
def test_verdict_is_that_of_the_whole_interval(interval, verdict):
    assert summary.Claim("", "a", "b", 0.7).verdict(intervals.Estimate(*interval)) == verdict


# --------------------------------------------------------------------------------------------------
# docs/accuracy.md


def test_page_is_what_the_recorded_study_gives():
    assert document.main(["--check"]) == 0


def test_page_is_filled_from_a_study(out):
    parts = results.load(out / "results")
    page = "Before.\n<!-- study:predictions -->\nold\n<!-- /study:predictions -->\nAfter.\n"
    filled = document.fill(page, {"study": parts})
    assert filled.startswith("Before.\n<!-- study:predictions -->\n| cache | bits |")
    assert filled.endswith("<!-- /study:predictions -->\nAfter.\n")
    assert "| k4v2 naive | 3.50 |" in filled
    assert document.fill(filled, {"study": parts}) == filled
    # Every claim that the parts can judge is under one verdict.
    made = document.blocks(parts)
    verdicts = [made[name] for name in ("holds", "does-not-hold", "not-established")]
    rows = sum(block.count("\n| ") - 1 for block in verdicts if block.startswith("|"))
    assert rows == len(list(summary.judged(parts))) > 5
