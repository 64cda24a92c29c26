"""Rollouts: the plan of episodes, and the collector that plays them token-exactly."""
