"""Evaluation: episodes on held-out tasks, and the table of their results."""
