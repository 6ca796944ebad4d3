"""A stateful fuzz of `kvarn.PagedCache` against the dense model of dense_cache.py.

Before every read all that no sequence owns is NaN; the pools are small, so that steps often do not
fit, which must change nothing.
"""

from __future__ import annotations

import pytest
import torch
from dense_cache import CheckedCache
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvarn import Format

FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group
NUM_TOKENS = st.one_of(
    st.sampled_from([0, 1, 1, 1, 2, G - 1, G, G + 1, 2 * G]), st.integers(0, 2 * G + 5)
)
FRACTIONS = st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: on a busy machine threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class CacheMachine(RuleBasedStateMachine):
    @initialize(
        sink_blocks=st.integers(0, 2), recent_blocks=st.integers(0, 2), seed=st.integers(0, 99)
    )
    def start(self, sink_blocks, recent_blocks, seed):
        self.checked = CheckedCache(
            FMT,
            num_blocks=14,
            num_slots=9,
            num_kv_heads=1,
            sink_blocks=sink_blocks,
            recent_blocks=recent_blocks,
            seed=seed,
        )
        self.exported = []
        self.checked.new()

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.checked.model)))

    @property
    def holds_sequences(self):
        return bool(self.checked.model)

    @rule()
    @precondition(lambda self: len(self.checked.model) < 6)
    def new(self):
        self.checked.new()

    @rule(data=st.data(), drafting=st.booleans())
    @precondition(lambda self: self.holds_sequences)
    def step(self, data, drafting):
        """Up to three sequences; drafts, of which some are rejected."""
        seqs = data.draw(
            st.lists(st.sampled_from(sorted(self.checked.model)), max_size=3, unique=True)
        )
        counts = [data.draw(NUM_TOKENS) for _ in seqs]
        draft = [round(n * data.draw(FRACTIONS)) if drafting else 0 for n in counts]
        accepted = [
            n - round(d * data.draw(FRACTIONS)) if d else n
            for n, d in zip(counts, draft, strict=True)
        ]
        window = data.draw(st.sampled_from([-1, -1, 0, 40]))
        self.checked.step(list(zip(seqs, counts, strict=True)), draft, accepted, window)

    @rule(data=st.data(), fraction=FRACTIONS)
    @precondition(lambda self: self.holds_sequences and len(self.checked.model) < 6)
    def fork(self, data, fraction):
        seq = self.pick(data)
        self.checked.fork(seq, round(self.checked.model[seq].length * fraction))

    @rule(data=st.data(), removed=NUM_TOKENS)
    @precondition(lambda self: self.holds_sequences)
    def truncate(self, data, removed):
        seq = self.pick(data)
        self.checked.truncate(seq, max(0, self.checked.model[seq].length - removed))

    @rule(data=st.data())
    @precondition(lambda self: self.holds_sequences)
    def free(self, data):
        self.checked.free(self.pick(data))

    @rule(data=st.data(), stays=st.booleans())
    @precondition(lambda self: self.holds_sequences)
    def export(self, data, stays):
        seq = self.pick(data)
        self.exported.append(self.checked.export(seq))
        if not stays:
            self.checked.free(seq)

    @rule()
    @precondition(lambda self: self.exported and len(self.checked.model) < 6)
    def restore(self):
        if self.checked.restore(self.exported[-1]) is not None:
            self.exported.pop()

    @rule()
    def check(self):
        self.checked.check()

    def teardown(self):
        if hasattr(self, "checked"):
            self.checked.check()
            for seq in list(self.checked.model):
                self.checked.free(seq)
            self.checked.check()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=40,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
