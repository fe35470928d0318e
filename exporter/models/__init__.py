"""One file per model family, named after config.json's ``model_type``, in folders by the kind of layer."""
