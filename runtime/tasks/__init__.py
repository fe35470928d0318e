"""The functions under the command line: export, quantize, optimize, verify, diff, evaluate, benchmark."""
