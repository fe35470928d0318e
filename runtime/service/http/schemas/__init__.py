"""The OpenAPI document of the HTTP endpoints, without a web framework."""
