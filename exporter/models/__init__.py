"""One file per model family, named after config.json's ``model_type``."""
