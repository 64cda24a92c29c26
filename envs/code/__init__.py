"""``agentrl/Code-v0``: programming problems from data sets, judged by hidden tests."""
