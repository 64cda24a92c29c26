"""Run folders: settings, episodes, checkpoints and the report of a run."""
