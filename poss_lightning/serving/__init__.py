"""vLLM: a plugin that serves drafts, features that it reads, and its server measured (docs/serving.md)."""
