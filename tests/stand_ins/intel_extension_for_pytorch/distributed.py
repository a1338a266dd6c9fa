import torch.distributed


def all_reduce(tensor: torch.Tensor, group: torch.distributed.ProcessGroup) -> None:
    torch.distributed.all_reduce(tensor, group=group)
