"""Gradients over ranks: buckets, the reducer that all adapters share, compression, sparse rows."""
