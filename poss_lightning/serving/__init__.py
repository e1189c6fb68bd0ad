"""vLLM: a plugin that serves drafts, and features that it reads (docs/serving.md)."""
