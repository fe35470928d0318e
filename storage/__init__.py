"""Files: the cache's place, content hashes, manifests, untrusted paths, failed writes."""
