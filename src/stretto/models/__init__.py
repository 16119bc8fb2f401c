"""Models: finding, loading and (in time) mapping checkpoints."""
