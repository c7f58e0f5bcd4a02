"""Subcommands of `mcore-ckpt`, one module for each: `add` its options, `run` it."""
