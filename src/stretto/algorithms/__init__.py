"""How rewards become a loss: pure functions of tensors, one table a kind; ``objective`` puts them together."""
