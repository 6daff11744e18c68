import torch

torch.set_num_threads(1)  # the models here are so small that a second thread only waits
