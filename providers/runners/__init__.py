"""How a step of the engine becomes runs of a session."""
