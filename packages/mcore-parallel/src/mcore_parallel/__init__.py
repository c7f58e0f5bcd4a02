"""Meshes, layouts, collectives and every parallel axis of large-model training."""
