"""Training: the step, the run around it, and their diagnostics and checks."""
