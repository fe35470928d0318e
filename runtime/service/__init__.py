"""Serving one engine over the network.

`handler` knows requests and deltas but no transport, `grpc_*` carries them over gRPC, `openai` knows OpenAI's
JSON shapes, `serve` is the life of the process.
"""
