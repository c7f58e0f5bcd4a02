"""Generation from mcore checkpoints: cache, sampler, engine and the LLM object."""
