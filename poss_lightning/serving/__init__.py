"""vLLM: a plugin that serves drafts, and features that vLLM computes (docs/serving.md)."""
