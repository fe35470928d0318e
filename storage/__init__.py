"""Files: the cache folder, locks, content hashes, manifests, checks of untrusted paths, failed writes."""
