"""An endpoint that agents of any make speak to as to a model's server, and that records the tokens of their turns."""
