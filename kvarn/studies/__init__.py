"""Accuracy studies on real models and on synthetic tiles, in plain torch: they judge encoders, not
kernels. Needs the extra ``kvarn[demo]`` (transformers, gguf, matplotlib, rich)."""
