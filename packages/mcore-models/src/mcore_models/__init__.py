"""Transformer language models that know their layout: importable alone, trainable over any mesh."""
