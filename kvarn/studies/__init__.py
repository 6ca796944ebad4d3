"""Accuracy studies on real models and on synthetic tiles, in plain torch: they judge encoders, not
kernels. Needs the extra ``kvarn[demo]`` (transformers, gguf, matplotlib, rich).

``python -m kvarn study`` runs `study`: `cases` (what is compared: `encoders`, `steps`), measured by
`divergence`, `attention_error`, `free_running`, `tiles` and `synthetic`, kept by `results`, told by
`summary`, `figures`, `report` and, for docs/accuracy.md, `document`. `column_scale` is a smaller
study of one question.
"""
