"""The parts of a run as actors on a Ray cluster, and the samples on their way between them through TransferQueue."""
