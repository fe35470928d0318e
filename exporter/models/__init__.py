"""One file per model family; the file name is config.json's ``model_type``."""
