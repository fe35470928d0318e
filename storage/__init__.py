"""Files: the cache folder, content hashes, manifests, checks of untrusted paths, errors of failed writes."""
