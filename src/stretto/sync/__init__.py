"""Weight sync: the trainer's layout to the engine's, every step."""
