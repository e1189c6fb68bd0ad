"""Drafts in serving engines: a plugin for vLLM (docs/serving.md)."""
