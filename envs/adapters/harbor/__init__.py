"""``agentrl/Harbor-v0``: folders in Harbor's task format, played in containers and graded in fresh ones.

``folder.py`` reads a task; ``box.py`` is an episode's container with its shell; ``carry.py`` and ``verdict.py`` decide
what a grading container gets and what its reward files mean; ``grading.py`` runs the tests; ``host.py`` holds what a
process shares, which is the engine, images and containers that were started ahead.
"""
