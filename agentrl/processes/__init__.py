"""Singletons of a process."""
