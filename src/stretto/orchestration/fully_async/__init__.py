"""Generation and training at the same time, each on devices of its own."""
