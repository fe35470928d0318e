"""The lists of passes that lower a graph to each kind of target."""
