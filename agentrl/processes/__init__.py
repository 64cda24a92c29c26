"""Singletons of a process, and a pool of worker processes."""
