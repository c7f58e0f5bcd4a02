"""Reinforcement learning on the same models: environments, advantages, algorithms."""
