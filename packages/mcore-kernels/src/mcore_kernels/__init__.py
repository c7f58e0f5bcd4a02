"""Operators of transformer and state-space models: a plain-torch reference, fast paths, and a reason for every choice."""
