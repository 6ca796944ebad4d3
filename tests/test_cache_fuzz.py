"""A stateful fuzz of `kvarn.PagedCache` against the dense model of dense_cache.py.

Before every read all that no sequence owns is NaN; the pools are small, so that steps often do not
fit, which must change nothing.
"""

from __future__ import annotations

import pytest
import torch
from dense_cache import CheckedCache, Replayed
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvarn import Format

FMT = Format("kvarn_k4v2_g64", head_dim=64)
G = FMT.group
NUM_TOKENS = st.one_of(st.sampled_from([1, G - 1, G, G + 1, 2 * G]), st.integers(0, 2 * G + 5))
MOST = 6  # sequences
FRACTIONS = st.sampled_from([1.0, 0.0, 0.3, 0.5, 0.9])


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """The tensors are tiny: on a busy machine threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class CacheMachine(RuleBasedStateMachine):
    dtype, device = torch.float32, "cpu"

    @initialize(
        sink_blocks=st.sampled_from([0, 1, 0, 2]),
        recent_blocks=st.sampled_from([0, 1, 0, 2]),
        num_slots=st.sampled_from([20, 8]),
        seed=st.integers(0, 99),
        first=NUM_TOKENS,
    )
    def start(self, sink_blocks, recent_blocks, num_slots, seed, first):
        self.checked = CheckedCache(
            FMT,
            num_blocks=20,
            num_slots=num_slots,
            num_kv_heads=1,
            sink_blocks=sink_blocks,
            recent_blocks=recent_blocks,
            dtype=self.dtype,
            device=self.device,
            seed=seed,
        )
        self.graph = Replayed(self.checked.cache, room=MOST, max_seq_len=21 * G)
        self.exported = []
        self.checked.step([(self.checked.new(), first), (self.checked.new(), 10)])

    def pick(self, data):
        return data.draw(st.sampled_from(sorted(self.checked.model)))

    def has_room(self):
        return len(self.checked.model) < MOST

    @rule(count=st.sampled_from([1, 2, 16]))
    def everyone(self, count):
        """A decode step of all sequences."""
        self.checked.step([(seq, count) for seq in self.checked.model])

    @rule(data=st.data(), towards_end=st.booleans(), times=st.integers(1, 6))
    def replay(self, data, towards_end, times):
        """Decode steps in a graph, which leaves what it fills to the next step."""
        seqs = list(self.checked.model)
        if towards_end:
            tails = [-self.checked.model[seq].length % G for seq in seqs]
            fill = [(seq, max(tail - 3, 0)) for seq, tail in zip(seqs, tails, strict=True)]
            self.checked.step(fill)
        for _ in range(times):
            chosen = [seq for seq in seqs if data.draw(st.booleans())]
            drafts = [data.draw(st.integers(0, 1)) for _ in chosen]
            accepted = [1 - d * data.draw(st.integers(0, 1)) for d in drafts]
            requests = [(seq, 1) for seq in chosen]
            self.checked.step(requests, drafts, accepted, graph=self.graph)

    @rule(data=st.data(), count=NUM_TOKENS, other=st.sampled_from([0, 1, 70]))
    def prompt(self, data, count, other):
        a, b = self.pick(data), self.pick(data)
        self.checked.step([(a, count)] if a == b else [(a, count), (b, other)])

    @rule(data=st.data(), count=st.integers(1, 9), kept=FRACTIONS, window=st.sampled_from([-1, 40]))
    def draft(self, data, count, kept, window):
        """Towards the end of a block, then drafts across it."""
        seq = self.pick(data)
        tail = self.checked.model[seq].length % G
        if data.draw(st.booleans()) and self.checked.step([(seq, (G - 4 - tail) % G)]) is None:
            return
        draft = data.draw(st.integers(1, count))
        accepted = count - draft + round(draft * kept)
        self.checked.step([(seq, count)], [draft], [accepted], window)

    @rule(data=st.data(), count=NUM_TOKENS, kept=FRACTIONS)
    def long_draft(self, data, count, kept):
        seqs = list(self.checked.model)
        draft = [round(count * data.draw(FRACTIONS)) for _ in seqs]
        accepted = [count - d + round(d * kept) for d in draft]
        self.checked.step([(seq, count) for seq in seqs], draft, accepted)

    @precondition(has_room)
    @rule(data=st.data(), fraction=FRACTIONS)
    def fork(self, data, fraction):
        seq = self.pick(data)
        self.checked.fork(seq, round(self.checked.model[seq].length * fraction))

    @precondition(has_room)
    @rule(data=st.data())
    def fork_and_diverge(self, data):
        seq = self.pick(data)
        child = self.checked.fork(seq)
        self.checked.step([(seq, 1), (child, 1)])

    @rule(data=st.data(), fraction=FRACTIONS, regrown=NUM_TOKENS)
    def truncate(self, data, fraction, regrown):
        seq = self.pick(data)
        self.checked.truncate(seq, round(self.checked.model[seq].length * fraction))
        self.checked.check()
        self.checked.step([(seq, regrown)])

    @precondition(lambda self: len(self.checked.model) > 3)
    @rule(data=st.data())
    def free(self, data):
        self.checked.free(self.pick(data))

    @precondition(has_room)
    @rule(count=NUM_TOKENS)
    def reuse(self, count):
        self.checked.step([(self.checked.new(), count)])

    @rule(data=st.data())
    def export(self, data):
        seq = self.pick(data)
        self.exported.append(self.checked.export(seq))
        if len(self.checked.model) > 1:
            self.checked.free(seq)

    @rule()
    def seal(self):
        self.checked.seal()

    @precondition(lambda self: self.exported and self.has_room())
    @rule()
    def restore(self):
        if self.checked.restore(self.exported[-1]) is not None:
            self.exported.pop()

    @invariant()
    def check(self):
        self.checked.check()

    def teardown(self):
        for seq in list(self.checked.model):
            self.checked.free(seq)
        self.checked.check()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
