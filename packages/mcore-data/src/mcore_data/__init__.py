"""Corpora, tokenizers, datasets and exactly resumable samplers."""
