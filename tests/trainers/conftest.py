"""The tests of trainers compute in one thread, as their ranks do."""

import torch

torch.set_num_threads(1)
