"""Engines sample tokens: ``transformers`` (embedded) and ``scripted`` (tests, oracles)."""
