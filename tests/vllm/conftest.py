"""What the tests of the vLLM plugin share."""

from __future__ import annotations

import engine  # installs the stand-ins before anything else of vLLM is imported
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a model with heads of 64 channels."""
    return engine.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def model_of(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a model by the channels of its heads."""
    return lambda head_dim: engine.write_model(tmp_path_factory.mktemp("model"), head_dim)
