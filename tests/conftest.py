"""What all tests share: a fixed seed, and CUDA tests only where there is CUDA."""

from __future__ import annotations

import pytest
import torch

from kvarn import _load

collect_ignore = ["vllm"]  # has an environment of its own: `make test-vllm`

# Tests are many and small: threads would cost more than they bring. Those about the division of
# work, and those that run a model, set their own number.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _load.why_unavailable("cuda")
    if reason is None and not torch.cuda.is_available():
        reason = "torch finds no CUDA device"
    if reason is not None:
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
