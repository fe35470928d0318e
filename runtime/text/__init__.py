"""Between text and tokens: tokenizers, templates, grammars, stop strings."""
