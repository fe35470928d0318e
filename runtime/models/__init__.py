"""From the name of a model to something an engine can run."""
