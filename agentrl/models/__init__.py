"""Models: how they are loaded or made, and how they attend to rows laid end to end."""
