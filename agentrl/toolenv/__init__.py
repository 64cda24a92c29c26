"""Environments: the contract that all keep, tasks, tools, dialects of tool calls, the registry and the checker."""
