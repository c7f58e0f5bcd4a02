"""The training loop, optimizers, recipes, parity and the quickstart."""
