"""Diagnostics: where a mapper errs, and whether attention looks there.

One small file for each published quantity, pure functions of tensors; `run.diagnose` puts them together.
No diagnostic opens the gate: `docs/diagnostics.md` says what each one predicts and how well.
"""
