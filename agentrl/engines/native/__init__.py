"""The decode step in C: a decoder's new tokens of many rows, several times as fast as through PyTorch.

``agentrl.native`` compiles it when an engine is first made. It takes its weights from a transformers model
(``weights``), and is checked against that model's own forward pass (``step``). Where one of these can't be, the engine
computes by PyTorch.
"""
