"""Sessions, the generation engine, and the faces built on it (service, batch jobs)."""
