"""``reasoning-gym/<task>-v0``: the tasks of the library reasoning-gym."""
