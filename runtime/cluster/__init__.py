"""The service on several machines: replicas behind Ray Serve."""
