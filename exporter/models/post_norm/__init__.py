"""Decoders with norms behind attention and the feed-forward layer, with or without norms in front."""
