"""``agentrl sweep``: one training run for every pair of the varied settings and every seed, and a table of them all."""
