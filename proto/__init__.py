"""The wire contract and its generated code."""
