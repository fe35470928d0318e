"""Pictures: open them, cut them into tiles, and number their places in a prompt."""
