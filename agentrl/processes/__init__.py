"""Singletons of a process, a pool of worker processes, and processes that end with their parent."""
