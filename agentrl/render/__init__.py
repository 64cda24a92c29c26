"""Messages to token ids, append-only: the renderer, its model of a chat template, and its tokenization."""
