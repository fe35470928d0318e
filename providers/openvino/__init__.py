"""Models and sessions on OpenVINO."""
