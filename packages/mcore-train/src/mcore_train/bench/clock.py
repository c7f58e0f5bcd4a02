"""Waiting for a device, so that a clock on the host means something."""

import torch


def synchronise(device: torch.device) -> None:
    """Return when all work queued on `device` is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
