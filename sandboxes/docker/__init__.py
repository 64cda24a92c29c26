"""The ``docker`` back end: containers, the engine that runs them, and the image they are made from."""
