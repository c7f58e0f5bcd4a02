from mcore_parallel.testing.plugin import ranks

__all__ = ["ranks"]
